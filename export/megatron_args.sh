# 02_gpt.py on 8 devices: cp 4 x tp 2. For Megatron-LM (commit d98e8a64dd).
# Not carried:
# - which parameters the plan splits over tp: the trainer has its own rule
# - the model and its data: add --num-layers, --hidden-size, --data-path and so on to ARGS
# source megatron_args.sh && torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
export CUDA_DEVICE_MAX_CONNECTIONS=1  # before Blackwell, TP and CP assert it
ARGS=(
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 1
  --context-parallel-size 4 --cp-comm-type p2p
  --expert-model-parallel-size 1
  --micro-batch-size 16 --global-batch-size 16
  --seq-length 128 --max-position-embeddings 128
  --clip-grad 0.0
  --optimizer adam
  --lr 0.001 --weight-decay 0.01
  --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-08
  --overlap-grad-reduce
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
