"""A reward model as a process, for machines without SGLang:

    python -m rlkit.engines.embedded.reward_server --model-path FOLDER --port PORT

`POST /classify` with `input_ids` or `text`, one or a list, answers as SGLang does with `--is-embedding`. Flags that
SGLang has too are called and mean the same here.
"""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

logger = logging.getLogger("rlkit.engines.embedded.reward")

MAX_WAITING = 64
"""Requests; a further one is told to come again (503)."""


class InputError(ValueError):
    """A request that cannot be scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The command line."""

    model_path: str
    host: str
    port: int
    device: str
    dtype: str
    batch_tokens: int
    num_threads: int
    trust_remote_code: bool


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    parser = argparse.ArgumentParser(prog="rlkit.engines.embedded.reward_server", allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help="folder of a sequence classification model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30100)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-prefill-tokens", type=int, default=8192, dest="batch_tokens", help="of one forward")
    parser.add_argument("--num-threads", type=int, default=0, help="intra-op threads; 0: torch's choice")
    parser.add_argument("--trust-remote-code", action="store_true")
    return ServerArgs(**vars(parser.parse_args(argv)))


class RewardModel:
    """A model with a classification head, and how much of it fits into one forward."""

    def __init__(self, args: ServerArgs) -> None:
        auto: Any = transformers.AutoModelForSequenceClassification
        model, info = auto.from_pretrained(
            args.model_path,
            dtype=getattr(torch, args.dtype),
            trust_remote_code=args.trust_remote_code,
            output_loading_info=True,
        )
        if info["missing_keys"]:  # transformers makes up a head where the checkpoint has none
            missing = ", ".join(sorted(info["missing_keys"]))
            raise SystemExit(f"{args.model_path}: no reward model, the checkpoint lacks {missing}")
        self._model = model.to(args.device).eval()
        self._device = args.device
        self._batch_tokens = args.batch_tokens
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            args.model_path, trust_remote_code=args.trust_remote_code
        )
        config = self._model.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """[row][label], in the order of the rows; shorter ones are padded to the longest of their forward."""
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        scores: list[list[float]] = [[] for _ in rows]
        while order:
            longest, members = 0, []
            while order:
                width = max(longest, len(rows[order[0]]))
                if members and (len(members) + 1) * width > self._batch_tokens:
                    break
                longest = width
                members.append(order.pop(0))
            for row, values in zip(members, self._forward([rows[row] for row in members], longest), strict=True):
                scores[row] = values
        return scores

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]], longest: int) -> list[list[float]]:
        # A classification head finds the last token of a row as the last one that is not the padding id. So padding is
        # done with an id that ends no row: chat templates end in the id that many models pad with.
        ends = {row[-1] for row in rows}
        pad_id = next(token for token in range(len(ends) + 1) if token not in ends)
        self._model.config.get_text_config().pad_token_id = pad_id
        ids = torch.full((len(rows), longest), pad_id)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return logits.float().cpu().tolist()

    def read(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """(rows of ids, whether one was sent by itself). InputError where there is nothing to score."""
        given = body.get("input_ids")
        if given is None:
            text = body.get("text")
            texts = [text] if isinstance(text, str) else text
            if not isinstance(texts, list) or not texts or not all(isinstance(item, str) for item in texts):
                raise InputError("send input_ids or text: one, or a list of them")
            given, is_single = [self.tokenizer.encode(item) for item in texts], isinstance(text, str)
        else:
            is_single = isinstance(given, list) and bool(given) and isinstance(given[0], int)
        rows = [given] if body.get("input_ids") is not None and is_single else given
        if not isinstance(rows, list) or not rows:
            raise InputError("input_ids must be a list of ids, or a list of such lists")
        for place, row in enumerate(rows):
            if not isinstance(row, list) or not row or not all(isinstance(token, int) for token in row):
                raise InputError(f"row {place}: input_ids must be whole numbers, at least one")
            if len(row) > self.context_length:
                raise InputError(f"row {place} has {len(row)} tokens, the model takes {self.context_length}")
            if not 0 <= min(row) <= max(row) < self.vocab_size:
                raise InputError(f"row {place} has an id outside the vocabulary of {self.vocab_size}")
        return rows, is_single


def create_app(model: RewardModel, model_path: str) -> FastAPI:
    """The part of SGLang's API that scores."""
    app = FastAPI()
    lock = asyncio.Lock()
    num_waiting = 0

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/model_info")
    async def model_info() -> dict[str, object]:
        return {"model_path": model_path, "is_generation": False}

    @app.post("/classify")
    async def classify(request: Request) -> JSONResponse:
        nonlocal num_waiting
        if num_waiting >= MAX_WAITING:
            return JSONResponse({"error": {"message": f"{num_waiting} requests wait already"}}, status_code=503)
        num_waiting += 1
        try:
            body = await request.json()
            rows, is_single = model.read(body if isinstance(body, dict) else {})
            async with lock:
                scores = await asyncio.to_thread(model.score, rows)
        except ValueError as error:  # JSON that cannot be read, or what `read` refuses
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        finally:
            num_waiting -= 1
        answers = [
            {"embedding": values, "meta_info": {"prompt_tokens": len(row)}}
            for row, values in zip(rows, scores, strict=True)
        ]
        return JSONResponse(answers[0] if is_single else answers)

    return app


def main(argv: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    model = RewardModel(args)
    logger.info(f"reward model {args.model_path} on {args.device}, at http://{args.host}:{args.port}/classify")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(create_app(model, args.model_path), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
