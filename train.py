"""Synchronous training: generate, train, hand over the weights, repeat.

    python train.py --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size 32 ...      (--help lists every flag)

`Session` owns the processes; what a step costs and where it runs is decided in `phases` (GPUs shared or split), not
here.
"""

import sys

from rlkit.cli.entry import prepare_run, run_cli


def main(argv: list[str]) -> None:
    plan = prepare_run(argv)  # parses, checks, answers --help and --dry-run; neither torch nor ray is imported yet

    from rlkit.orchestration.session import Session  # local: seconds of imports

    with Session(plan.cfg, num_steps=plan.num_steps, run_dir=plan.run_dir, config_json=plan.config_json) as run:
        run.sync_weights(version=run.start_step)
        run.evaluate_if_due(run.start_step)
        for step in range(run.start_step, run.num_steps):
            with run.phases.generating():
                shards = run.generate(step)
            with run.phases.training():
                run.train(step, shards)
                run.save_if_due(step)
            run.sync_weights(version=step + 1)
            run.report(step)
            run.evaluate_if_due(step + 1)


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
