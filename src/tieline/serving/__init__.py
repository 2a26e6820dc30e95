"""Files that run without Tieline: they need torch and the program that loads them only.

modeling_tieline      copied into the folder of a smoothed model, for `trust_remote_code=True`
modeling_tieline_mlx  the same for mlx-lm
vllm_plugin           lets vLLM serve such a folder, and rerouted ones by vllm_rerouted
router_replay         routes of the replay objects of Megatron-Core and verl, and their differences
flip_counts           the logged metrics of a rollout
"""
