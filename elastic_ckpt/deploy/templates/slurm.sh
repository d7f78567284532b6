#!/bin/bash
${options}
set -u

# The directory of this job on the RAM disk of each node. A job that is requeued has the
# same number, and finds what its nodes still hold.
ram=${ram_directory}-$SLURM_JOB_ID
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
${write_files}
# What a task does before the program.
task=$(cat <<'END_OF_FILE'
# The switches above the node, as a failure domain.
case ${SLURM_TOPOLOGY_ADDR_PATTERN:-} in
  *switch.node) export ELASTIC_CKPT_DOMAINS="switch=${SLURM_TOPOLOGY_ADDR%.*}" ;;
esac
${task_commands}exec "$@"
END_OF_FILE
)

${program_commands}

# `scancel` also ends this script: then nothing is requeued.
is_cancelled=
trap 'is_cancelled=1' TERM
srun ${srun_options} bash -c "$task" - "${program[@]}"
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
  ${config_exit_code}) echo "not requeued: the configuration is wrong" >&2 ;;
  # SIGTERM before the time limit: all is saved, and the next start continues.
  143) can_help=1 ;;
  *)
    echo "$code" >> "$failures"
    [ "$(wc -l < "$failures")" -gt ${max_restarts} ] || can_help=1
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
