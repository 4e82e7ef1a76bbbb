#!/bin/bash
# A fault-tolerant training on Slurm: dead ranks are started again on the remaining nodes, and a job that reaches its time
# limit saves, ends and queues itself again. Submit it once: sbatch examples/slurm.sh CONFIG
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600   # only to this script, ten minutes before the end

config=${1:?usage: sbatch examples/slurm.sh CONFIG}
out=${OUT:-runs/$SLURM_JOB_NAME}
nproc=${NPROC:-8}

# torchrun would give its ranks only 30 seconds after a signal, so the run is asked through its control file.
leave() {
    echo "stop: true" > "$out/control.yaml"
    wait "$step"
    rm -f "$out/control.yaml"
    grep -q '"state": "stopped"' "$out/status.json" && scontrol requeue "$SLURM_JOB_ID"
}
trap leave USR1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "1:$SLURM_NNODES" --nproc-per-node "$nproc" --max-restarts 100 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \
    -m elixir_moe train --config "$config" --run.out "$out" &
step=$!
wait "$step"
