python3 -m sglang.launch_server --model-path /models/GLM-5.2-FP8 --tp-size 4 --pp-size 2 \
  --nsa-prefill-backend fa3 --nsa-decode-backend fa3 --chunked-prefill-size 8192 \
  --mem-fraction-static 0.88 --host 0.0.0.0 --port 30000 --trust-remote-code
