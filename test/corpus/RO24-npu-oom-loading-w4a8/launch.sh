python -m sglang.launch_server --model-path /models/DeepSeek-R1-0528-w4a8 --tp-size 8 --trust-remote-code \
  --attention-backend ascend --device npu --quantization modelslim --mem-fraction-static 0.8 \
  --host 0.0.0.0 --port 30000 --disable-cuda-graph
