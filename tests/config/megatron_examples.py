"""Examples of `rules/megatron.py` for `test_config_rules.py`."""

from typing import Any

MEGATRON = {"train_backend": "megatron"}

MEGATRON_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "megatron_flags_have_their_backend": [
        (
            {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
            {**MEGATRON, "tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        ),
        ({"recompute_granularity": "full"}, {**MEGATRON, "recompute_granularity": "full"}),
    ],
    "megatron_does_what_is_asked": [
        ({**MEGATRON, "async_save": True}, {"async_save": True}),
        ({**MEGATRON, "freeze_params_name_list": ("norm",)}, {"freeze_params_name_list": ("norm",)}),
        ({**MEGATRON, "torch_compile": "on"}, {**MEGATRON, "torch_compile": "off"}),
    ],
    "sequence_parallel_has_tensor_ranks": [
        (
            {**MEGATRON, "sequence_parallel": True},
            {**MEGATRON, "sequence_parallel": True, "tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        ),
    ],
    "virtual_stages_have_stages": [
        (
            {**MEGATRON, "num_virtual_stages_per_pipeline_rank": 2},
            {
                **MEGATRON,
                "num_virtual_stages_per_pipeline_rank": 2,
                "pipeline_model_parallel_size": 2,
                "actor_num_gpus_per_node": 2,
            },
        ),
    ],
    "uneven_stages_are_whole_runs": [
        (
            {**MEGATRON, "decoder_last_pipeline_num_layers": 3},
            {
                **MEGATRON,
                "decoder_last_pipeline_num_layers": 3,
                "pipeline_model_parallel_size": 2,
                "actor_num_gpus_per_node": 2,
            },
        ),
    ],
    "recomputation_is_whole": [
        (
            {**MEGATRON, "recompute_method": "block"},
            {**MEGATRON, "recompute_granularity": "full", "recompute_method": "block"},
        ),
        (
            {**MEGATRON, "recompute_granularity": "selective", "gradient_checkpointing": False},
            {**MEGATRON, "recompute_granularity": "selective"},
        ),
    ],
}
