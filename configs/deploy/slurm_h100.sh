#!/bin/bash
#SBATCH --job-name=demo-slurm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --mem=475136M
#SBATCH --partition=h100
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --no-kill
#SBATCH --exclusive
set -u

# The directory of this job on the RAM disk of each node. A job that is requeued has the
# same number, and finds what its nodes still hold.
ram=/dev/shm/demo-slurm-$SLURM_JOB_ID
# A line for each start that has failed.
failures=$SLURM_SUBMIT_DIR/$SLURM_JOB_NAME-$SLURM_JOB_ID.failures

on_each_node() {
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 "$@"
}

# The program's files. Whoever owns the directory could change the steps in it.
write='
umask 077
mkdir -p "$1" || exit
if [ -L "$1" ] || [ ! -O "$1" ]; then
  echo "$1 on $(hostname) belongs to $(stat -c %U "$1"): remove it there, or set" \
    "slurm_ram_directory to another RAM disk" >&2
  exit 1
fi
cat > "$1/$2"
'
on_each_node bash -c "$write" - "$ram" config.yml <<'END_OF_FILE' || exit
run_name: demo-slurm
base_output_directory: /shared/runs
steps: 1000
slices: 2
devices_per_host: 8
hardware: gpu
grain_train_files: /shared/data/texts.array_record
global_batch_size: 192
enable_multi_tier_checkpointing: true
local_checkpoint_period: 5
multi_tier_checkpointing_backup_interval_steps: 100
elastic_enabled: true
elastic_min_slice_count: 1
END_OF_FILE

# What a task does before the program.
task=$(cat <<'END_OF_FILE'
# The switches above the node, as a failure domain.
case ${SLURM_TOPOLOGY_ADDR_PATTERN:-} in
  *switch.node) export ELASTIC_CKPT_DOMAINS="switch=${SLURM_TOPOLOGY_ADDR%.*}" ;;
esac
source /shared/venv/bin/activate
exec "$@"
END_OF_FILE
)

program=(elastic-ckpt train "$ram"/config.yml "local_checkpoint_directory=$ram/steps" "elastic_machines=$SLURM_JOB_NUM_NODES" hosts=2)

# `scancel` also ends this script: then nothing is requeued.
is_cancelled=
trap 'is_cancelled=1' TERM
srun --label --no-kill --kill-on-bad-exit=0 --wait=0 bash -c "$task" - "${program[@]}"
code=$?

keep_steps=$(cat <<'END_OF_FILE'
if [ -n "$(find "$1/steps" -name "manifest-*" -print -quit 2> /dev/null)" ]; then
  echo "kept on $(hostname): $1, the steps in RAM. To continue from them:" >&2
  echo "scontrol requeue $2 (on the nodes $3). Remove $1 if you do not." >&2
else
  rm -rf "$1"
fi
END_OF_FILE
)

can_help=
case $code in
  0) ;;
  78) echo "not requeued: the configuration is wrong" >&2 ;;
  # SIGTERM before the time limit: all is saved, and the next start continues.
  143) can_help=1 ;;
  *)
    echo "$code" >> "$failures"
    [ "$(wc -l < "$failures")" -gt 10 ] || can_help=1
    ;;
esac
if [ -n "$can_help" ] && [ -z "$is_cancelled" ]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  rm -f "$failures"
  case $code in
    # Storage has all that was due there.
    0 | 143) on_each_node rm -rf "$ram" ;;
    # The nodes' RAM may have more. Only a job of this number finds it.
    *)
      on_each_node bash -c "$keep_steps" - "$ram" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"
      ;;
  esac
fi
exit "$code"
