"""Stand-alone scripts that run inside an engine's own Python, without the rest of Tieline.

main        reads the request, calls the engine's module, writes the answer or one error
llamacpp    llama.cpp through llama-cpp-python
mlx         mlx-lm
vllm        vLLM on one process

They import numpy and their engine only, inside the functions that use them, and run on Python 3.9.
"""
