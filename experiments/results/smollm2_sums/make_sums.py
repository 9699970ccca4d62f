"""Few-shot sums for a pretrained model: three solved ones, then one to solve; a line feed ends an answer.

    python make_sums.py HF_FOLDER DIR

DIR gets the folder's tokenizer without its chat template, config.json with the line feed as end token, sums.jsonl and
prompts.jsonl; link or copy model.safetensors beside them.
"""

import json
import random
import shutil
import sys
from pathlib import Path

LINES, SHOTS, SHOWN = 1500, 3, 64
source, out = map(Path, sys.argv[1:])
out.mkdir(exist_ok=True)
rng = random.Random(0)


def pair() -> tuple[int, int]:
    return rng.randrange(10, 50), rng.randrange(2, 10)


answers: dict[str, str] = {}
while len(answers) < LINES:
    shots = [pair() for _ in range(SHOTS)]
    a, b = pair()
    prompt = "".join(f"{x} + {y} = {x + y}\n" for x, y in shots) + f"{a} + {b} ="
    answers.setdefault(prompt, f" {a + b}")
lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in answers.items()]
(out / "sums.jsonl").write_text("\n".join(lines) + "\n")
(out / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in list(answers)[:SHOWN]) + "\n")

shutil.copy(source / "tokenizer.json", out)
line_feed = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]["Ċ"]
config = json.loads((source / "config.json").read_text()) | {"eos_token_id": line_feed}
(out / "config.json").write_text(json.dumps(config))
tokenizer = json.loads((source / "tokenizer_config.json").read_text()) | {"eos_token": "Ċ", "pad_token": "Ċ"}
tokenizer.pop("chat_template", None)
(out / "tokenizer_config.json").write_text(json.dumps(tokenizer))
