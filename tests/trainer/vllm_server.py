"""
A server that speaks the part of vLLM's protocol that TRL's server mode uses, over HTTP, and samples from a tiny model.

The weights alone come another way: vLLM takes them over NCCL, which needs a GPU, and [`send_weights`] hands them over
in this process. All else is TRL's own client.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from tests import tiny


class Server(ThreadingHTTPServer):
    """
    Args:
        model (`PreTrainedModel`): what it samples from, until it gets other weights.
    """

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model.eval()
        self.generator = torch.Generator().manual_seed(0)
        self.requests = []  # paths, in their order
        self.completions = []  # what each generation returned, row by row
        self.announced = None  # names of the weights that are to come
        self.sent = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def get(self, path):
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": {"backend": "nccl"},
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                }
            },
        }.get(path)

    def post(self, path, body):
        if path == "/v1/completions":
            return {"choices": [choice for ids in body["prompt"] for choice in self._complete(ids, body)]}
        if path == "/update_weights":
            self.announced = body["update_info"]["names"]
            assert self.sent.wait(timeout=3600), "no weights came"
            self.sent.clear()
        return {"success": True}

    def receive(self, named):
        """The weights, in the order that is announced."""
        weights = {name: weight.clone() for name, weight in named}
        self.model.load_state_dict(weights, strict=False)
        assert weights.keys() == dict(self.model.named_parameters()).keys()
        self.received = weights
        self.sent.set()

    @torch.no_grad()
    def _complete(self, prompt_ids, body):
        ids = torch.tensor([prompt_ids] * body["n"])
        drawn, logps = [], []
        for _ in range(body["max_tokens"]):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, -1].float() / body["temperature"]
            scores = logits.log_softmax(-1)
            drawn.append(torch.multinomial(scores.exp(), 1, generator=self.generator))
            logps.append(scores.gather(1, drawn[-1]))
            ids = torch.cat([ids, drawn[-1]], dim=1)
        rows = []
        for tokens, values in zip(torch.cat(drawn, 1).tolist(), torch.cat(logps, 1).tolist(), strict=True):
            end = tokens.index(tiny.IDS["eos_token_id"]) + 1 if tiny.IDS["eos_token_id"] in tokens else len(tokens)
            rows.append((prompt_ids, tokens[:end], values[:end]))
        self.completions += rows
        return [
            {
                "prompt_token_ids": prompt_ids,
                "token_ids": tokens,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": values,
                    "top_logprobs": [{f"token_id:{t}": v} for t, v in zip(tokens, values, strict=True)],
                },
            }
            for _, tokens, values in rows
        ]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(self.server.get(self.path.partition("?")[0]))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(self.path)
        self._answer(self.server.post(self.path, json.loads(body or "{}")))

    def _answer(self, content):
        content = None if content is None else json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args):
        pass
