# Four machines with sshd in network namespaces of this one: `unshare --net --mount bash THIS FOLDER COMMAND...`
# runs the command where node1 to node4 (10.77.0.1 to .4) can be reached with the options in FOLDER/options.
set -u
FOLDER=$1; shift
mount -t tmpfs none /run
mkdir -p /run/netns /run/sshd
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.254/24 dev br0
ip link set br0 up
cp /etc/hosts "$FOLDER/hosts-of-all"
for i in 1 2 3 4; do echo "10.77.0.$i node$i" >> "$FOLDER/hosts-of-all"; done
mount --bind "$FOLDER/hosts-of-all" /etc/hosts
for key in host user; do ssh-keygen -q -t ed25519 -N "" -f "$FOLDER/$key"; done
cat > "$FOLDER/sshd.conf" <<C
HostKey $FOLDER/host
AuthorizedKeysFile $FOLDER/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
C
echo "-i $FOLDER/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR" > "$FOLDER/options"
PIDS=""
for i in 1 2 3 4; do
  ip netns add n$i
  ip link add h$i type veth peer name e0 netns n$i
  ip link set h$i master br0 up
  ip -n n$i addr add 10.77.0.$i/24 dev e0
  ip -n n$i link set e0 up
  ip -n n$i link set lo up
  ip netns exec n$i unshare --uts bash -c "hostname node$i; exec $(command -v sshd) -D -e -f $FOLDER/sshd.conf" 2> "$FOLDER/sshd$i" &
  PIDS="$PIDS $!"
done
for i in 1 2 3 4; do until grep -q listening "$FOLDER/sshd$i"; do sleep 0.1; done; done
"$@"
CODE=$?
kill $PIDS
exit $CODE
