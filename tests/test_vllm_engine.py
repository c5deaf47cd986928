"The vLLM engine against a server that speaks the token endpoint: what is asked for, what is read, and every way to fail."
import asyncio, json
import numpy as np
import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.vllm import PATH, VLLMEngine, generation
from clawlab.records import EngineError, InputError

T = Template.bytes()
IDS = [97, 98, 257]

def answer(ids=IDS, finish='stop', **kw):
    content = [{'token': f'token_id:{i}', 'token_id': i, 'logprob': -.25*(k + 1), 'rank': 1, 'top_logprobs': []} for k, i in enumerate(ids)]
    return {'request_id': 'r', 'choices': [{'index': 0, 'token_ids': ids, 'finish_reason': finish, 'stop_reason': None, 'logprobs': {'content': content}, **kw}]}

class Server:
    "A fake vLLM: `say` is the answer, or a coroutine function of the request."
    def __init__(self, say=None, card=None, info=None): self.say, self.card, self.info, self.seen, self.cancelled = say or answer(), card or {}, info, [], asyncio.Event()
    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(PATH, self.generate)
        app.router.add_get('/v1/models', lambda r: web.json_response({'data': [{'id': 'm', 'max_model_len': 4096, **self.card}]}) if r else None)
        if self.info is not None: app.router.add_get('/server_info', lambda r: web.json_response(self.info if r.query.get('config_format') == 'json' else {'vllm_config': 'text'}))
        self.runner = web.AppRunner(app, handler_cancellation=True); await self.runner.setup()
        site = web.TCPSite(self.runner, '127.0.0.1', 0); await site.start()
        self.url = f'http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}'
        return self
    async def __aexit__(self, *exc): await self.runner.cleanup()
    async def generate(self, request):
        self.seen.append(await request.json())
        try: return await self.say(self, request) if callable(self.say) else web.json_response(self.say)
        except asyncio.CancelledError: self.cancelled.set(); raise

async def ask(server, sp=Sampling(max_tokens=8), prompt='hi'):
    e = VLLMEngine(server.url + '/', T, model='m')
    try: return await e.generate(T.encode(prompt), sp, None), e
    finally: await e.close()

async def test_tokens_in_tokens_out_with_log_probs():
    async with Server() as s: g, e = await ask(s, Sampling(temperature=.5, top_p=.9, top_k=40, max_tokens=8, seed=7))
    assert g.ids.tolist() == IDS and g.logprobs.tolist() == [-.25, -.5, -.75] and g.versions.tolist() == [-1]*3 and g.finish == 'stop'
    (d,) = s.seen; sp = d['sampling_params']
    assert d['token_ids'] == T.encode('hi').tolist() and d['model'] == 'm' and d['stream'] is False
    assert (sp['temperature'], sp['top_p'], sp['top_k'], sp['max_tokens'], sp['seed'], sp['logprobs']) == (.5, .9, 40, 8, 7, 0)
    assert sp['stop_token_ids'] == list(T.eos_ids)

async def test_neutral_parameters_are_sent_too():
    "What a request leaves out, vLLM takes from the model's generation_config.json."
    async with Server() as s: await ask(s)
    sp = s.seen[0]['sampling_params']
    assert (sp['top_p'], sp['top_k'], sp['min_p'], sp['repetition_penalty'], sp['presence_penalty'], sp['frequency_penalty']) == (1, -1, 0, 1, 0, 0) and 'seed' not in sp

@pytest.mark.parametrize('ends', [(1, 3), (0, 2)], ids=['exclusive', 'inclusive'])
async def test_versions_of_weights_per_token(ends):
    spans = [{'version': '5', 'start': 0, 'end': ends[0]}, {'version': '6', 'start': 1, 'end': ends[1]}]
    async with Server(answer(weight_versions=spans)) as s: g, e = await ask(s)
    assert g.versions.tolist() == [5, 6, 6] and e.version == 6

async def test_versions_that_are_no_numbers_are_unknown():
    async with Server(answer(weight_versions=[{'version': 'default', 'start': 0, 'end': 3}])) as s: g, e = await ask(s)
    assert g.versions.tolist() == [-1]*3 and e.version == -1

async def test_a_reply_cut_at_the_limit():
    async with Server(answer([97, 98], 'length')) as s: g, _ = await ask(s)
    assert g.finish == 'length' and len(g.ids) == 2

async def test_a_long_prompt_arrives_whole():
    async with Server() as s: await ask(s, prompt='x'*300_000)
    assert len(s.seen[0]['token_ids']) == 300_000

def without(key):
    d = answer(); del d['choices'][0][key]
    return d

@pytest.mark.parametrize('bad', [{}, {'choices': []}, [], answer(finish='abort'), answer(finish=None), without('token_ids'), without('logprobs'), answer(logprobs=None),
                                 answer(logprobs={'content': [{'logprob': -1}]}), answer(logprobs={'content': [{'token_id': 1, 'logprob': -1}]*3}), answer(token_ids=['a', 'b', 'c']),
                                 answer(weight_versions=[{'version': 1}])], ids=str)
def test_an_answer_that_is_not_usable_is_an_engine_error(bad):
    with pytest.raises(EngineError): generation(json.dumps(bad).encode())

def test_an_answer_that_is_not_json_is_an_engine_error():
    with pytest.raises(EngineError): generation(b'<html>')

@pytest.mark.parametrize('status', [400, 403, 429, 500, 503])
async def test_an_error_status_is_an_engine_error_that_says_why(status):
    async def say(s, r): return web.json_response({'error': {'message': 'engine is dead'}}, status=status)
    async with Server(say) as s:
        with pytest.raises(EngineError, match=f'{status}.*engine is dead'): await ask(s)

async def test_no_server_is_an_engine_error():
    async with Server() as s: pass
    with pytest.raises(EngineError): await ask(s)

async def test_a_connection_cut_in_the_answer_is_an_engine_error():
    async def say(s, r):
        resp = web.StreamResponse(headers={'Content-Length': '1000'}); await resp.prepare(r); await resp.write(b'{"choices"'); r.transport.abort()
        return resp
    async with Server(say) as s:
        with pytest.raises(EngineError): await ask(s)

async def test_cancellation_closes_the_connection():
    begun = asyncio.Event()
    async def say(s, r): begun.set(); await asyncio.Event().wait()
    async with Server(say) as s:
        e = VLLMEngine(s.url, T); task = asyncio.create_task(e.generate(T.encode('hi'), Sampling(), None))
        await begun.wait(); task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        await asyncio.wait_for(s.cancelled.wait(), 10)   # the server has seen the client go
        await e.close()

async def test_a_dead_kept_connection_does_not_break_the_engine_for_good():
    async with Server() as s:
        e = VLLMEngine(s.url, T)
        for _ in range(2): assert (await e.generate(T.encode('a'), Sampling(), None)).ids.tolist() == IDS
        await e.close()
        assert (await e.generate(T.encode('a'), Sampling(), None)).ids.tolist() == IDS   # a closed engine opens again
        await e.close()

def tokenizer_folder(path):
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = Tokenizer(models.BPE(vocab, [])); tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.add_special_tokens([AddedToken(s, special=True) for s in ('<|im_start|>', '<|im_end|>')])
    path.mkdir(); tok.save(str(path/'tokenizer.json'))
    return path

async def test_the_command_line_spec(tmp_path):
    from clawlab.cli import make_engine
    d = tokenizer_folder(tmp_path/'tok')
    async with Server(card={'root': str(d)}) as s:
        for spec in (f'vllm:{s.url}', f'vllm:{s.url}@{d}'):
            e = await asyncio.to_thread(make_engine, spec)
            assert (e.name, e.model, e.max_context, e.url) == ('vllm', 'm', 4096, s.url) and e.template.vocab_size == 258
    async with Server(card={'root': 'org/model'}) as s:
        with pytest.raises(InputError, match='tokenizer folder'): await asyncio.to_thread(make_engine, f'vllm:{s.url}')
    with pytest.raises(InputError, match='no vLLM server'): await asyncio.to_thread(make_engine, f'vllm:{s.url}')
    for bad in ('vllm:', 'vllm:x', 'vllm:ftp://x'):
        with pytest.raises(InputError, match='http'): make_engine(bad)

@pytest.mark.parametrize('info, want', [(None, 256), ({'vllm_config': {'scheduler_config': {'max_num_seqs': 3}, 'parallel_config': {'data_parallel_size': 2}}}, 6),
                                        ({'vllm_config': {'scheduler_config': {'max_num_seqs': 3}, 'parallel_config': {}}}, 3), ({'vllm_config': 'x'}, 256), ([], 256)], ids=str)
async def test_the_proxy_sends_as_many_calls_as_the_server_works_on(tmp_path, info, want):
    "The rest wait at the proxy, where sessions take turns: in the server's own queue the first to come would be the first served."
    from clawlab.capture.proxy import Proxy
    from clawlab.capture.store import Store
    async with Server(card={'root': str(tokenizer_folder(tmp_path/'tok'))}, info=info) as s: e = await asyncio.to_thread(VLLMEngine.open, s.url)
    with Store.open(str(tmp_path/'c.db')) as st: assert Proxy(e, st).turnstile.slots == e.max_batch == want

async def test_through_the_proxy_a_dead_engine_is_a_5xx_and_a_live_one_is_captured(tmp_path):
    import aiohttp
    from clawlab.capture.proxy import Proxy
    from clawlab.capture.store import Store
    from clawlab.records import Rollout
    ask = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}
    async with Server(answer(weight_versions=[{'version': '2', 'start': 0, 'end': 3}])) as s:
        e = VLLMEngine(s.url, T)
        with Store.open(str(tmp_path/'c.db')) as st:
            async with Proxy(e, st) as p, aiohttp.ClientSession() as http:
                x = await p.open_session(Rollout('r', '', 'h'))
                post = lambda: http.post(f'http://127.0.0.1:{p.port}{x.base_path}/v1/chat/completions', json=ask, headers={'Authorization': f'Bearer {x.api_key}'})
                async with post() as r: assert (await r.json())['choices'][0]['message']['content'] == 'ab'
                s.say = {'choices': []}
                async with post() as r: assert r.status >= 500
            await e.close()
            ok, failed = st.calls('r')
            assert ok.output_ids.tolist() == IDS and ok.versions.tolist() == [2]*3 and np.allclose(ok.logprobs, [-.25, -.5, -.75]) and failed.finish == 'error'
            assert ok.prompt_ids.tolist() == s.seen[0]['token_ids']
