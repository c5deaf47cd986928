"The nano policy: exact round trips, determinism, a folder that everything can load."
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from clawlab.capture.chat import SPECIALS, Template
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.oracle import shell_call
from clawlab.capture.engines.torch import TorchEngine
from clawlab.learn import nano
from clawlab.records import Call, InputError, Message, Rollout

BASH = dict(name='bash', description='Run "one" command — é', parameters={'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']})
WORDS = ['frost', 'memo', 'jade', 'atlas']

def teacher():
    old, h, calls = Template.bytes(), [Message('system', 'You work in a shell.'), Message('user', 'Append frost to memo.')], []
    for m in (Message('assistant', '', 'hm', (shell_call(BASH, 'command', 'echo frost >> memo'),)), Message('assistant', 'done')):
        out = old.reply_ids(m)
        calls.append(Call(f'c{len(calls)}', 'r', len(calls), old.render(h, [BASH]), out, np.full(len(out), np.nan), np.full(len(out), -1), messages=tuple(h), tools=(BASH,), response=m))
        h = h + [m, Message('tool', '(no output)')]
    return Rollout('r', 't', 'react', calls=tuple(calls))

@pytest.fixture(scope='module')
def tok(): return nano.build_tokenizer(nano.texts_of([teacher()])*2, WORDS)

@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60) | st.lists(st.sampled_from([*WORDS, ' ', '  ', '\n', '_', 's/', '/', '"', "'", 'x', '>>', '<|im_end|>', 'é']), max_size=20).map(''.join))
def test_any_text_comes_back(tok, s):
    t = Template.from_tokenizer(tok)
    ids = t.encode(s)
    assert t.decode(ids) == s.encode('utf-8', 'replace').decode() and not set(ids.tolist()) & set(t.special.values())

def test_words_are_single_tokens_only_when_they_stand_alone(tok):
    t = Template.from_tokenizer(tok)
    one = {w: int(t.encode(w)[0]) for w in WORDS}
    assert all(len(t.encode(w)) == 1 for w in WORDS) and len(set(one.values())) == 4
    assert one['jade'] in t.encode('sed -i s/frost/jade/ memo') and one['memo'] in t.encode('attic/memo') and one['memo'] not in t.encode('memos')
    assert tok.get_vocab_size() <= 1200 and [tok.token_to_id(str(s)) for s in SPECIALS] == list(range(6))

def test_model_is_decided_by_the_seed(tok):
    torch.manual_seed(5); before = torch.get_rng_state()
    a, b, c = [nano.build_model(tok, s) for s in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters())) and not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.lm_head.weight is a.model.embed_tokens.weight and a.model.embed_tokens.weight.std(0).mean().item() == pytest.approx(.1, rel=.02)
    assert a.model.layers[0].self_attn.q_norm.weight[0].item() == pytest.approx(1.6) and a.config.max_position_embeddings == 4096

@pytest.mark.parametrize('shape', [{}, dict(d=128, heads=4, kv=1, layers=2), dict(d=96, heads=4, kv=4, layers=3)])
def test_it_starts_as_a_copier(tok, shape):
    "First heads look one token back; every head's output projection says what its value projection took in."
    m = nano.build_model(tok, 1, **shape); m.set_attn_implementation('eager')
    c, x = m.config, torch.randint(6, tok.get_vocab_size(), (4, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): att = m(x, output_attentions=True).attentions[0]
    rep = c.num_attention_heads//c.num_key_value_heads
    back = att.diagonal(-1, 2, 3)[:, :, 4:].mean((0, 2))
    assert (back[:rep] > .7).all() and (back[rep:] < .4).all()
    a, D = m.model.layers[-1].self_attn, c.head_dim
    for h in range(c.num_attention_heads):
        ov = a.o_proj.weight[:, h*D:(h+1)*D] @ a.v_proj.weight[h//rep*D:(h//rep+1)*D]
        assert torch.allclose(ov @ ov, ov*1.5/rep, atol=1e-5) and torch.allclose(ov, ov.T, atol=1e-6) # a scaled projection

async def test_folder_round_trip(tmp_path):
    p = nano.prepare(tmp_path/'a', [teacher()]*2, WORDS, seed=3, d=32, layers=2)
    nano.prepare(tmp_path/'b', [teacher()]*2, WORDS, seed=3, d=32, layers=2)
    for f in ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'): assert (p/f).read_bytes() == (tmp_path/'b'/f).read_bytes()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    t, model, hf = Template.from_dir(p), AutoModelForCausalLM.from_pretrained(str(p)), AutoTokenizer.from_pretrained(str(p))
    c = teacher().calls[1]
    prompt = t.render(c.messages, [BASH])
    theirs = [dict(role=m.role, content=m.content, reasoning_content=m.reasoning, tool_calls=[dict(type='function', function=dict(name=x.name, arguments=x.raw)) for x in m.tool_calls]) for m in c.messages]
    assert hf.apply_chat_template(theirs, tools=[dict(type='function', function=BASH)], add_generation_prompt=True, tokenize=False) == t.decode(prompt)
    e = TorchEngine.from_dir(p)
    g = await e.generate(prompt, Sampling(max_tokens=6, seed=0))
    with torch.inference_mode(): lp = torch.log_softmax(model(torch.tensor([[*prompt, *g.ids]])).logits[0].double(), -1)
    assert np.abs([lp[len(prompt)-1+i, x] - g.logprobs[i] for i, x in enumerate(g.ids)]).max() < 1e-4
    await e.close()
    with pytest.raises(InputError): TorchEngine.from_dir(tmp_path)

def test_retokenise(tok):
    t, old = Template.from_tokenizer(tok), Template.bytes()
    r = teacher(); new = nano.retokenise(r, t)
    for a, b in zip(r.calls, new.calls):
        assert old.decode(a.prompt_ids) == t.decode(b.prompt_ids) and old.decode(a.output_ids) == t.decode(b.output_ids) and len(b.prompt_ids) < len(a.prompt_ids)/2
    first, second = new.calls
    both = np.concatenate([first.prompt_ids, first.output_ids])
    assert (second.prompt_ids[:len(both)] == both).all() # one chain, as if it had been sampled
    from dataclasses import replace
    with pytest.raises(InputError): nano.retokenise(replace(r, calls=(replace(r.calls[0], logprobs=np.zeros(len(r.calls[0].output_ids))),)), t)
    with pytest.raises(InputError): nano.prepare('/nonexistent', [replace(r, calls=())])
