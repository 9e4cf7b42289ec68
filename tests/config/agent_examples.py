"""Examples of `rules/agents.py` for `test_config_rules.py`."""

from typing import Any

AGENT = {"custom_agent_path": "a.b"}
COMMAND = {"agent_command": "python agent.py {prompt} '{{}}'"}

AGENT_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "one_agent_is_named": [({**AGENT, **COMMAND}, {**AGENT, "rm_type": None}), ({**AGENT, **COMMAND}, COMMAND)],
    "one_thing_makes_responses": [
        ({**AGENT, "custom_generate_function_path": "a.c"}, {"custom_generate_function_path": "a.c"}),
        ({**AGENT, "partial_rollout": True, "over_sampling_batch_size": 64}, {**AGENT, "over_sampling_batch_size": 64}),
        ({**AGENT, "loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}, AGENT),
    ],
    "command_can_be_run": [
        ({"agent_command": "a {label}"}, {"agent_command": "a {task_file} {base_url} {api_key}"}),
        ({"agent_command": "a 'b"}, {"agent_command": "a 'b'"}),
        ({"agent_command": " "}, {"agent_command": "a"}),
    ],
    "settings_have_an_agent": [
        ({"agent_max_turns": 3}, {**AGENT, "agent_max_turns": 3}),
        ({"agent_host": "0.0.0.0"}, {**COMMAND, "agent_host": "0.0.0.0"}),
    ],
}
