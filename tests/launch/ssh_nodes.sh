# Machines with sshd, in network namespaces of this one: `unshare --net --mount --pid --fork --mount-proc bash THIS FOLDER N`.
# node1 to nodeN (10.77.0.1 to .N) exist until the input ends. Each has its own network, name and mounts; `ssh node1`
# works within the namespaces. With a third argument, this is root's password: there is no key, root's home is a new
# folder, `home`, and the nodes share `/mnt`.
set -eu
FOLDER=$1
COUNT=$2
PASSWORD=${3:-}
mount -t tmpfs none /run
mkdir -p /run/netns /run/sshd
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.254/24 dev br0
ip link set br0 up
cp /etc/hosts "$FOLDER/hosts"
for i in $(seq "$COUNT"); do echo "10.77.0.$i node$i" >> "$FOLDER/hosts"; done
mount --bind "$FOLDER/hosts" /etc/hosts
for key in host user; do ssh-keygen -q -t ed25519 -N "" -f "$FOLDER/$key"; done
KEYS=$FOLDER/user.pub
if [ -n "$PASSWORD" ]; then
  KEYS=.ssh/authorized_keys
  mkdir -m 700 "$FOLDER/home" "$FOLDER/mnt"
  mount --bind "$FOLDER/mnt" /mnt
  sed "s|^root:.*|root:x:0:0:root:$FOLDER/home:/bin/bash|" /etc/passwd > "$FOLDER/passwd"
  sed "s|^root:[^:]*|root:$(openssl passwd -6 "$PASSWORD")|" /etc/shadow > "$FOLDER/shadow"
  for file in passwd shadow; do mount --bind "$FOLDER/$file" /etc/$file; done
  : > "$FOLDER/ssh_config"
else
  cat > "$FOLDER/ssh_config" <<C
IdentityFile $FOLDER/user
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
C
fi
mount --bind "$FOLDER/ssh_config" /etc/ssh/ssh_config
cat > "$FOLDER/sshd.conf" <<C
HostKey $FOLDER/host
AuthorizedKeysFile $KEYS
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication $([ -n "$PASSWORD" ] && echo yes || echo no)
PidFile none
C
for i in $(seq "$COUNT"); do
  ip netns add "n$i"
  ip link add "h$i" type veth peer name e0 netns "n$i"
  ip link set "h$i" master br0 up
  ip -n "n$i" addr add "10.77.0.$i/24" dev e0
  ip -n "n$i" link set e0 up
  ip -n "n$i" link set lo up
  ip netns exec "n$i" unshare --uts bash -c \
    "hostname node$i; exec $(command -v sshd) -D -e -f $FOLDER/sshd.conf" 2> "$FOLDER/sshd$i" &
done
# On a busy machine the file does not exist at first.
for i in $(seq "$COUNT"); do until grep -qs listening "$FOLDER/sshd$i"; do sleep 0.1; done; done
echo ready
# When this process, the first of its namespace, ends, the kernel ends all others, and so the networks and mounts.
cat
