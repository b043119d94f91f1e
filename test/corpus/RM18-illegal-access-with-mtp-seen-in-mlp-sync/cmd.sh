#!/bin/bash
python3 -m sglang.launch_server --model-path /models/DeepSeek-V3.2-Exp --tp 8 --dp 8 --enable-dp-attention \
  --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
