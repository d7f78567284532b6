#!/bin/bash
# A run on Slurm: copy this file beside run.yml, change what is above the line, and
# `sbatch job.sh`. The steps in RAM outlive a requeue, and the job requeues itself.
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --exclusive
#SBATCH --partition=h100
# 64 GiB for the RAM disk, whose files count toward the job's memory, and 400 GiB for the
# node's hosts.
#SBATCH --mem=464G
#SBATCH --time=1-00:00:00
# Hosts receive SIGTERM this many seconds before the time limit, and save:
# termination_grace_period_seconds of run.yml.
#SBATCH --signal=TERM@60
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# An elastic run continues without a lost node; other runs end.
#SBATCH --no-kill

# The RAM disk of each node.
ram_disk=/dev/shm
# The most restarts after failures, not counting the time limit.
max_restarts=10
# GPUs of each task; a supervisor, the only task of its node, has all of them.
devices=8
# What each node runs before the program.
setup='source /shared/venv/bin/activate'
# The directory of this job on the RAM disk. A requeued job keeps its number, and finds
# what its nodes still hold.
ram=$ram_disk/$SLURM_JOB_NAME-$SLURM_JOB_ID
# The program of each task. run.yml is the same as on a laptop, on storage that all nodes
# share. `elastic-ckpt maxtext` takes MaxText's own file; a program of your own gets
# $ELASTIC_CKPT_LOCAL for ec.Local. Several tasks on a node need different metrics ports:
# add 'set -- "$@" "prometheus_port=$((9400 + SLURM_LOCALID))"' to setup.
program=(elastic-ckpt train "$SLURM_SUBMIT_DIR/run.yml" "local_checkpoint_directory=$ram/steps")
# A supervisor on each node: run.yml sets elastic_enabled, and slices to a multiple of the
# nodes. For a run without supervisors, delete these two lines and --no-kill.
program+=("elastic_machines=$SLURM_JOB_NUM_NODES")
is_elastic=1

# ----------------------------------------------------------------------------------------
set -u

# A line for each start that has failed.
failures=$SLURM_SUBMIT_DIR/$SLURM_JOB_NAME-$SLURM_JOB_ID.failures

on_each_node() {
  # srun would wait for a lost node, which is not in the job any more.
  local nodes
  nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$@"
}

# Whoever owns the directory could change the steps in it.
on_each_node bash -c '
umask 077
mkdir -p "$1" || exit
if [ -L "$1" ] || [ ! -O "$1" ]; then
  echo "$1 on $(hostname) belongs to $(stat -c %U "$1"): remove it there, or set" \
    "ram_disk to another RAM disk" >&2
  exit 1
fi
' - "$ram" || exit

# What a task does before the program.
export ELASTIC_CKPT_LOCAL=$ram/steps
task=$(cat <<'END_OF_TASK'
setup=$1 devices=$2 is_elastic=$3
shift 3
# The switches above the node, as a failure domain.
case ${SLURM_TOPOLOGY_ADDR_PATTERN:-} in
  *switch.node) export ELASTIC_CKPT_DOMAINS="switch=${SLURM_TOPOLOGY_ADDR%.*}" ;;
esac
if [ -z "$is_elastic" ]; then
  # JAX would take one device for each task.
  first=$((SLURM_LOCALID * devices))
  export JAX_LOCAL_DEVICE_IDS=$(seq -s, "$first" $((first + devices - 1)))
fi
eval "$setup"
exec "$@"
END_OF_TASK
)

# All hosts find a wrong configuration and end with its status by themselves. When one host
# dies, the others end once JAX misses it, at the latest after 300 seconds.
options=(--label --kill-on-bad-exit=0 --wait=300)
[ -z "${is_elastic:-}" ] || options=(--label --no-kill --kill-on-bad-exit=0 --wait=0)

# `scancel` also sends SIGTERM to this script, which then requeues nothing.
is_cancelled=
trap 'is_cancelled=1' TERM
srun "${options[@]}" bash -c "$task" - "$setup" "$devices" "${is_elastic:-}" "${program[@]}"
code=$?

keep_steps=$(cat <<'END_OF_TASK'
if [ -n "$(find "$1/steps" -name "manifest-*" -print -quit 2> /dev/null)" ]; then
  echo "kept on $(hostname): $1, the steps in RAM. To continue from them:" >&2
  echo "scontrol requeue $2 (on the nodes $3). Remove $1 if you do not." >&2
else
  rm -rf "$1"
fi
END_OF_TASK
)

can_help=
case $code in
  0) ;;
  78) echo "not requeued: the configuration is wrong" >&2 ;;
  # SIGTERM before the time limit: all is saved, and the next start continues.
  143) can_help=1 ;;
  *)
    echo "$code" >> "$failures"
    [ "$(wc -l < "$failures")" -gt "$max_restarts" ] || can_help=1
    ;;
esac
if [ -n "$can_help" ] && [ -z "$is_cancelled" ]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  rm -f "$failures"
  if [ -n "$is_cancelled" ]; then
    # A cancelled job cannot start anything on its nodes.
    [ "$code" != 143 ] || rm -rf "$ram"
    echo "cancelled. What nodes still hold in $ram is removed by: srun" \
      "--nodes=$SLURM_JOB_NUM_NODES --ntasks-per-node=1" \
      "--nodelist=$SLURM_JOB_NODELIST rm -rf $ram" >&2
    exit "$code"
  fi
  case $code in
    # Storage has everything that was due.
    0 | 143) on_each_node rm -rf "$ram" ;;
    # The nodes' RAM may have more, which only a job of this number finds.
    *)
      on_each_node bash -c "$keep_steps" - "$ram" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"
      ;;
  esac
fi
exit "$code"
