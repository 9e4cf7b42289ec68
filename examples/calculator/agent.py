"""The calculator task as an agent that knows nothing of rlkit: plain HTTP to an OpenAI-compatible endpoint, a tool, a
loop. It runs against any server that speaks that API.

    --custom-agent-path examples/calculator/agent.py:run
    --agent-command "python examples/calculator/agent.py"
"""

import json
import operator
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of an expression of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_REQUESTS = 3
EXPRESSION = re.compile(r"(\d{1,9})([*+-])(\d{1,9})")
OPERATORS = {"*": operator.mul, "+": operator.add, "-": operator.sub}


def run(base_url: str, api_key: str, task: dict[str, Any]) -> float:
    """One episode: ask the model, use the calculator where it wants it; 1 for the right number at the end."""
    messages = list(task["prompt"])
    for _ in range(MAX_REQUESTS):
        message = chat(base_url, api_key, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            said = calculate(json.loads(call["function"]["arguments"]).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    return float((messages[-1]["content"] or "").strip() == task["label"])


def chat(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def calculate(expression: object) -> str:
    """The tool itself."""
    parts = EXPRESSION.fullmatch(str(expression))
    return "error" if parts is None else str(OPERATORS[parts[2]](int(parts[1]), int(parts[3])))


def main() -> None:
    """As a command: settings from the environment, the task from a file, the reward as the last line."""
    task = json.loads(Path(os.environ["RLKIT_TASK_FILE"]).read_text(encoding="utf-8"))
    reward = run(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task)
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
