"""Asynchronous training: engines generate the next samples while the trainer works on the last ones.

    python train_async.py --rollout-num-gpus 4 --hf-checkpoint DIR ...              one step ahead
    python train_async.py --async-mode full --max-staleness 2 ...                   generation never stops

The flags are those of `train.py`. Engines and trainer have GPUs of their own. With `full`, `generate` takes the next
batch out of what has been generated, and nothing ever has to be begun.
"""

import sys

from rlkit.cli.entry import prepare_run, run_cli


def main(argv: list[str]) -> None:
    plan = prepare_run(argv, program="train_async.py")

    from rlkit.orchestration.session import Session  # local: seconds of imports

    with Session(plan.cfg, num_steps=plan.num_steps, run_dir=plan.run_dir, config_json=plan.config_json) as run:
        run.sync_weights(version=run.start_step)
        run.evaluate_if_due(run.start_step)
        for step in range(run.start_step, run.num_steps):
            shards = run.generate(step)  # of the first step; later ones have been begun
            run.begin_generating(step + 1)
            run.train(step, shards)
            run.save_if_due(step)
            run.sync_weights(version=step + 1)  # under running requests, or after the last one
            run.report(step)
            run.evaluate_if_due(step + 1)


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
