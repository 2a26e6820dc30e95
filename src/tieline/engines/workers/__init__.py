"""Stand-alone scripts that run inside an engine's own Python; the rest of Tieline is not there.

main        reads the request, calls the engine's module, writes the answer or one error
llamacpp    llama.cpp through llama-cpp-python
mlx         mlx-lm
vllm        vLLM on one process

They import numpy and their engine only, each where it is used, and take Python 3.9.
"""
