# A Slurm cluster of four nodes on this machine, in namespaces of its own (see slurm_cluster.py). It says `ready`, and
# ends with its input: this is the first process of its namespace, so that everything in it ends, too.
set -u
FOLDER=$1
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.77.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
cp /etc/hosts "$FOLDER/hosts"
echo "10.77.0.1 n0 n1 n2 n3" >> "$FOLDER/hosts"
mount --bind "$FOLDER/hosts" /etc/hosts
mkdir -p "$FOLDER/munge" "$FOLDER/state" "$FOLDER/spool"
chmod 700 "$FOLDER/munge"
dd if=/dev/urandom of="$FOLDER/munge/key" bs=1024 count=1 2>/dev/null
chmod 400 "$FOLDER/munge/key"
cat > "$FOLDER/slurm.conf" <<C
ClusterName=t
SlurmctldHost=$(hostname -s)(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge/socket
CredType=cred/munge
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool/%n
SlurmctldPidFile=$FOLDER/ctld.pid
SlurmdPidFile=$FOLDER/d.%n.pid
SlurmctldLogFile=$FOLDER/ctld.log
SlurmdLogFile=$FOLDER/d.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=0
MpiDefault=none
MinJobAge=300
SlurmdTimeout=60
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobSubmitPlugins=lua
OverTimeLimit=5
KillWait=30
NodeName=n[0-3] NodeHostname=$(hostname -s) NodeAddr=10.77.0.1 Port=[7000-7003] CPUs=2 RealMemory=1000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
C
# Without a database of accounts Slurm takes any. This is how a site refuses one.
cat > "$FOLDER/job_submit.lua" <<C
function slurm_job_submit(job)
  if job.account == "nobody" then return slurm.ESLURM_INVALID_ACCOUNT end
  return slurm.SUCCESS
end
function slurm_job_modify() return slurm.SUCCESS end
C
export SLURM_CONF=$FOLDER/slurm.conf
munged --force --foreground --key-file "$FOLDER/munge/key" --socket "$FOLDER/munge/socket" --pid-file "$FOLDER/munge/pid" \
  --log-file "$FOLDER/munge/log" --seed-file "$FOLDER/munge/seed" > /dev/null 2>&1 &
while [ ! -S "$FOLDER/munge/socket" ]; do sleep 0.1; done
slurmctld -D > "$FOLDER/ctld.out" 2>&1 &
for i in 0 1 2 3; do
  mkdir -p "$FOLDER/spool/n$i"
  slurmd -D -N n$i > "$FOLDER/d$i.out" 2>&1 &
  done
until [ "$(sinfo -h -N -p p -t idle 2>/dev/null | wc -l)" = 4 ]; do sleep 0.2; done
echo ready
read -r
