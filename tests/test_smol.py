"""SmolLM2-135M as it comes out of its package: the folder, the engine and the trainer say the same. `make test-smol`."""
import numpy as np, pytest, torch
from transformers import AutoModelForCausalLM
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.torch import TorchEngine
from clawlab.learn import forest
from clawlab.learn.smol import smollm2
from clawlab.learn.tree import build_tree
from clawlab.records import Call, Message

pytestmark = pytest.mark.smol

async def test_answers_and_engine_and_trainer_agree():
    folder = smollm2(); t = Template.from_dir(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    ask = np.array(t.render((Message('user', 'What is the capital of France?'),), ()), np.int32)
    engine = TorchEngine(model, t)
    try:
        greedy = await engine.generate(ask, Sampling(temperature=0., max_tokens=24))
        drawn = await engine.generate(ask, Sampling(temperature=1., max_tokens=24, seed=1))
    finally: await engine.close()
    assert 'Paris' in t.decode(greedy.ids)
    tree = build_tree([Call('a', 'r', 0, ask, drawn.ids, drawn.logprobs, drawn.versions, 'stop', used={'temperature': 1.})])
    f, = forest.pack([tree])
    with torch.no_grad(): got = forest.logprobs(model, f).numpy()
    assert np.abs(got - tree.logprobs_T[tree.train_T]).max() < 1e-4

def test_made_once(capsys):
    before = (smollm2()/'model.safetensors').stat().st_mtime_ns
    said = []
    assert (smollm2(said.append)/'model.safetensors').stat().st_mtime_ns == before and not said
