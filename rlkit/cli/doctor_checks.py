"""All checks of `rlkit doctor`, in the order in which they are shown."""

from rlkit.cli.doctor import Check
from rlkit.cli.doctor_engine import engine_contract
from rlkit.cli.doctor_machine import disk_space, file_limits, memory, network, shared_memory, versions
from rlkit.cli.doctor_model import chat_template, model_files, tokenizer
from rlkit.cli.doctor_processes import collectives, gpus, ray_starts

CHECKS = (
    Check(name="versions", ask=versions),
    Check(name="engine", ask=engine_contract),  # asked early, as it takes longest
    Check(name="gpus", ask=gpus),
    Check(name="collectives", ask=collectives),
    Check(name="shared memory", ask=shared_memory),
    Check(name="network", ask=network),
    Check(name="limits", ask=file_limits),
    Check(name="disk", ask=disk_space),
    Check(name="memory", ask=memory),
    Check(name="model", ask=model_files),
    Check(name="tokenizer", ask=tokenizer),
    Check(name="template", ask=chat_template),
    Check(name="ray", ask=ray_starts),
)
