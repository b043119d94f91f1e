#!/bin/bash


GPU_NUM=4
SERVER_IPV4="0.0.0.0"
SERVER_PORT=30000
MODEL_PATH="/srv/llm/GLM-4.5-Air-FP8"
MAX_REQUESTS=128
REASONING_PARSER="glm45"	# deepseek-r1 qwen3 kimi glm45
MEM_FRACTION_STATIC="0.7"


# Active Python virtual environment
source sglang_env/bin/activate


# Startup api server
python -m sglang.launch_server --model-path $MODEL_PATH --tp-size $GPU_NUM --host $SERVER_IPV4 --port $SERVER_PORT --max-running-requests $MAX_REQUESTS --mem-fraction-static $MEM_FRACTION_STATIC --reasoning-parser $REASONING_PARSER
