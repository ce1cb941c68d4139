#!/usr/bin/env bash
# usage: slurm_cluster.sh FOLDER   (as root)
# A Slurm cluster of this machine alone, 4 CPUs declared, with ports, keys and files of its own in
# FOLDER. Prints "ready" once jobs can run with SLURM_CONF=FOLDER/slurm.conf, then waits for SIGTERM,
# its parent's end, or five minutes, and takes everything down again.
set -euo pipefail
folder=$1
mkdir -p "$folder"/{state,spool,munge}
chmod 755 "$folder"
chmod 700 "$folder/munge"
(umask 077 && head -c 128 /dev/urandom >"$folder/munge/key")

free_port() {
  local port
  while :; do
    port=$((20000 + $1 + 2 * (RANDOM % 6000)))
    if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port" && return; fi
  done
}

host=$(uname -n)
host=${host%%.*}
cat >"$folder/slurm.conf" <<TEXT
ClusterName=lockstep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port 0)
SlurmdPort=$(free_port 1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=1
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
TEXT
export SLURM_CONF=$folder/slurm.conf

# A step that has not told slurmctld of its end keeps trying when that is gone.
daemons=()
take_down() {
  local environ pid
  for _ in {1..50}; do
    [ -n "$(squeue -h 2>/dev/null)" ] || break
    sleep 0.1
  done
  for environ in /proc/[0-9]*/environ; do
    pid=${environ//[!0-9]/}
    if [[ $(tr '\0' ' ' <"/proc/$pid/cmdline") == slurmstepd:* ]] &&
      grep -qzx "SLURM_CONF=$folder/slurm.conf" "$environ"; then
      kill -KILL "$pid" || true
    fi
  done 2>/dev/null
  kill "${daemons[@]}" 2>/dev/null || true
  for _ in {1..30}; do
    kill -0 "${daemons[@]}" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "${daemons[@]}" 2>/dev/null || true
  wait
}
trap take_down EXIT
trap 'exit 0' TERM INT HUP

munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
  >"$folder/munge/out" 2>&1 &
daemons+=($!)
slurmctld -D >"$folder/slurmctld.out" 2>&1 &
daemons+=($!)
slurmd -D >"$folder/slurmd.out" 2>&1 &
daemons+=($!)

for _ in {1..300}; do
  if sinfo -h -o %t 2>/dev/null | grep -qx idle; then ready=1 && break; fi
  sleep 0.1
done
if [ -z "${ready:-}" ]; then
  tail -n 20 "$folder"/*.log "$folder"/*.out "$folder"/munge/{log,out} >&2 || true
  echo "slurm_cluster.sh: the node does not come up" >&2
  exit 1
fi
echo ready
for _ in {1..600}; do
  kill -0 "$PPID" 2>/dev/null || exit 1
  sleep 0.5 &
  wait $! || true
done
exit 1
