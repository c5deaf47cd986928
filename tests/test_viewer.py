"""learn.viewer: what the page says, in a real browser; hostile text stays text."""
import asyncio, json, re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
import numpy as np, pytest
from browser import CHROMIUM, browser
from clawlab.capture.chat import Template
from clawlab.capture.tokens import END, SPECIALS, START, HFTokenizer
from clawlab.cli import main
from clawlab.learn.tree import build_tree
from clawlab.learn.viewer import Messages, additions, advantage_axes, call_text, guess_tokenizer, page, read_tokenizer, summary, vocabulary
from clawlab.records import Call, InputError, Message, Rollout, Task, ToolCall

@pytest.fixture
async def tab():
    if CHROMIUM is None: pytest.skip('no Chromium here (make test-browser)')
    async with browser() as t:
        await t.look(); yield t
        assert not t.errors and all(u.startswith(('file:///', 'about:')) and u.endswith(('.html', 'blank')) for u in t.requests), (t.errors, t.requests)

EVIL = '</script><img src=x onerror="window.hit=1;alert(1)"><script>window.hit=1</script>&amp;<b onclick=x>%%DATA%% \u2028 é \ud800'

class Agent:
    "Writes calls as a harness would: messages rendered by a template, tokens of the parent kept."
    def __init__(self, template, rollout='r', seed=0): self.t, self.rid, self.calls, self.rng = template, rollout, [], np.random.default_rng(seed)
    def call(self, history, reply, parent=None, role='main', tools=(), **kw):
        i = len(self.calls); prompt = self.t.render(history, tools)
        if parent is not None:   # graft: the parent's own tokens, then what is new
            p = self.calls[parent]
            if list(history[:len(p.messages) + 1]) == [*p.messages, p.response]: prompt = np.concatenate([p.prompt_ids, p.output_ids, self.t.delta(history, tools, len(p.messages) + 1)])
        out = self.t.reply_ids(reply); kw = dict(delivered=('yes',), model='policy') | kw
        self.calls.append(Call(f'{self.rid}.{i}', self.rid, i, prompt, out, -self.rng.exponential(.4, len(out)), [3] * len(out), parent_id=None if parent is None else f'{self.rid}.{parent}',
                               role=role, messages=tuple(history), tools=tools, response=reply, t_start=100. + i, t_end=100.5 + i, **kw))
        return i

BASH = ({'name': 'bash', 'description': 'Run a command', 'parameters': {'type': 'object', 'properties': {'command': {'type': 'string'}}}},)
def use(command): return Message('assistant', '', 'Let me look.', (ToolCall('x', 'bash', {'command': command}, json.dumps({'command': command})),))
def line(a, history, turns, role='main', tools=BASH, parent=None, result=lambda i: f'result {i}', between=lambda i: None, say=lambda i: f'cat file{i}.txt'):
    "A stretch of turns; returns the history and its last call."
    history = list(history)
    for i in range(turns):
        m = use(say(i)); parent = a.call(history, m, parent, role, tools); history += [m, Message('tool', result(i))]; between(i)
    return history, parent

def small(rid='r', reward=0.):
    "A rollout with all there is: a retry, a fork, a subagent, a compaction, a cut call, a side call, a hostile tool."
    a = Agent(Template.bytes(), rid); S, U = Message('system', 'You are an agent.'), Message('user', 'Fix the zebra.')
    a.call([Message('user', 'Title, in under 5 words?')], Message('assistant', 'Zebra'), role='side', role_reason='asks for a title')
    h, p = line(a, [S, U], 2, result=lambda i: EVIL if i else 'stripes')
    lost = a.call(h, use('rm -rf /'), p, tools=BASH, delivered=('no',))
    h2, won = line(a, h, 1, parent=p, say=lambda i: 'cat zebra.py')
    line(a, [Message('system', 'You are a helper.'), Message('user', 'Count stripes.')], 2, 'subagent')
    fork = a.call([*h2, Message('user', 'Rather the other way.')], use('other'), won, tools=BASH)
    cut = a.call(h2, Message('assistant', 'Half a'), won, tools=BASH, finish='aborted', delivered=('unknown',))
    a.call([*h2, Message('user', 'Your task is to create a detailed summary of the conversation.')], Message('assistant', 'The zebra has stripes.'), won, 'compaction', BASH)
    line(a, [S, Message('user', 'Summary: The zebra has stripes. Go on.')], 2)
    calls = [replace(c, role='main') if c.call_id in (f'{rid}.{fork}', f'{rid}.{cut}') else c for c in a.calls]
    return Rollout(rid, 'zebra-1', 'react', '1.0', group='g', outcome='ok', reward=reward, scores={'code': reward, 'nan': float('nan')}, meta={'reason': EVIL}, calls=tuple(calls)), lost

def large(template, words):
    "The tree benchmark's shape: 60 turns, 40 after a compaction, 5 subagents of 20 turns between them; `words(n)` is text of n tokens."
    a = Agent(template, 'big', 1); S = Message('system', words(15000)); side = []
    def between(i):
        if i % 10 == 5 and i < 50: side.append(line(a, [Message('system', words(10000)), Message('user', f'part {i}')], 20, 'subagent', result=lambda i: words(800), say=lambda i: words(200)))
    line(a, [S, Message('user', 'Go.')], 60, result=lambda i: words(800), between=between, say=lambda i: words(200))
    line(a, [S, Message('user', words(3000))], 40, result=lambda i: words(800), say=lambda i: words(200))
    return Rollout('big', 'large', 'claude-code', outcome='ok', reward=1., calls=tuple(a.calls))

# ---------------------------------------------------------------- without a browser

def test_the_page_has_no_door_for_markup_or_the_network():
    source = files('clawlab.learn').joinpath('viewer.html').read_text()
    assert not re.search(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment|srcdoc|https?:(?!//www\.w3\.org/2000/svg)|\bfetch\b|XMLHttp|import\(', source)
    assert "default-src 'none'" in source and 'unsafe' not in source
    assert 'package-data' in (text := (Path(__file__).parent.parent/'pyproject.toml').read_text()) and '"*.html"' in text

def test_the_page_wears_the_colours_of_the_reports():
    from clawlab.study.report import CSS
    palette = lambda s: re.findall(r':root\{--bg:[^}]*\}', s)
    assert palette(CSS) == palette(files('clawlab.learn').joinpath('viewer.html').read_text()) and len(palette(CSS)) == 2

def test_hostile_names_stay_in_json():
    r, _ = small(); r = replace(r, task_id=EVIL, harness='</title>' + EVIL)
    text = page([(build_tree(r.calls), r)], title=EVIL).text
    assert '<img' not in text and text.count('</script>') == 3 and text.count('<script') == 3 and '<b onclick' not in text
    assert json.loads(re.search(r'id="index">(.*?)</script>', text, re.S)[1])[0]['label'].startswith('</script><img')

def test_a_token_that_is_half_a_character(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])); tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tok.add_special_tokens([str(m) for m in SPECIALS]); t = Template(HFTokenizer(tok))
    tok.save(str(tmp_path/'tokenizer.json')); own = read_tokenizer(tmp_path)             # whatever its chat format
    ids = t.render([Message('user', 'Zébra 🦓 <|im_end|>')]); at, v = vocabulary(ids, t); ends = np.cumsum(v['len'])
    word = [(v['bytes'][e-n:e].tobytes(), m) for e, n, m in zip(ends, v['len'], v['mark'])]
    assert b''.join(word[w][0] for w in at).decode() == t.decode(ids) and (START.encode(), 1) in word and (END.encode(), 1) in word
    assert [own.spell(i) for i in ids.tolist()] == [t.spell(i) for i in ids.tolist()]
    assert sum(b == b'<' and not m for b, m in word) == 1                              # what the user typed is text
    assert t.spell(99999) == ('⟨99999⟩'.encode(), True) and guess_tokenizer(np.array([300])) is None and guess_tokenizer(np.array([261])) is not None

def test_additions_are_what_is_new_to_a_reader():
    r, lost = small(); parents = [next((j for j, d in enumerate(r.calls) if d.call_id == c.parent_id), -1) for c in r.calls]
    got = additions(r.calls, parents, Messages())
    assert got[1] == (-1, 0) and got[2] == (1, 3) and got[lost] == got[lost+1] == (2, 5)
    assert got[10] == (1, 1)                                                           # after the compaction: the system prompt is known
    assert [m.content for m in r.calls[10].messages[1:]] == ['Summary: The zebra has stripes. Go on.']

def test_advantages_by_number_call_and_token():
    t = build_tree(small()[0].calls); a = np.where(t.call_T == 1, 2., np.where(t.call_T == 2, -1., np.nan))
    assert advantage_axes(t, None)[0] == [None] * 12 and advantage_axes(t, .5)[0] == [.5] * 12 and advantage_axes(t, np.arange(12))[0][3] == 3
    per, tok = advantage_axes(t, a); assert per[1:3] == [2., -1.] and per[0] is None and len(tok) == len(t.ids_T)
    with pytest.raises(InputError): advantage_axes(t, [1., 2.])

def test_a_terminal_gets_no_escape_sequences():
    m = use('\x1b[31mred\x1b[0m\u202e'); assert '\x1b' not in call_text(m) and '\u202e' not in call_text(Message('assistant', '\u202ex')) and 'bash' in call_text(m)
    r, _ = small(); text = summary(build_tree(r.calls), r, -1.); assert text.count('\n') == 12 and 'abandoned' in text and 'advantage -1.00' in text and 'another reply was extended' in text

# ---------------------------------------------------------------- in the browser

def write(tmp_path, *items, **kw):
    f = tmp_path/'page.html'; f.write_text(page([(build_tree(r.calls), r) for r in items], **kw).text, encoding='utf-8'); return f

count = "+document.getElementById('count').textContent.split(' ')[0]"
rows = "document.querySelectorAll('.row').length"
call = lambda n: f"document.querySelector('h2').textContent === 'Call #{n}'"
pick = lambda name, value: f"(() => {{ const s = document.getElementById('{name}'); s.value = '{value}'; s.onchange() }})()"

async def test_calls_filters_and_search(tab, tmp_path):
    r, lost = small(); t = build_tree(r.calls); await tab.open(write(tmp_path, r))
    assert await tab.js(rows) == await tab.js(count) == t.stats['calls'] == 12
    assert await tab.js("document.querySelectorAll('.row svg circle').length") == 12
    for name, counts in (('role', t.stats['roles']), ('fate', t.stats['fates'])):
        for k, n in counts.items():
            await tab.js(pick(name, k)); assert await tab.js(rows) == await tab.js(count) == n, k
            assert await tab.js(f"[...document.querySelectorAll('#{name} option')].find(o => o.value === '{k}').textContent") == f'{k} ({n})'
        await tab.js(pick(name, ''))
    await tab.click('#only')
    trained = np.bincount(t.call_T[t.train_T], minlength=12); assert await tab.js(rows) == (trained > 0).sum()
    assert await tab.js("document.getElementById('count').textContent") == f"{(trained > 0).sum()} of 12 calls, {t.stats['trained']} tokens trained"
    await tab.click('#only')
    await tab.key('/'); await tab('Input.insertText', text='zebra.PY'); await tab.until(f"{rows} < 12")
    want = [c.seq for c in r.calls if 'zebra.py' in json.dumps([c.response.tool_calls[0].raw] if c.response.tool_calls else [])]
    got = await tab.js("[...document.querySelectorAll('.row b')].map(e => +e.textContent.slice(1))"); assert got[0] == want[0] == 4 and lost not in got
    await tab.key('Enter'); await tab.click('.row'); await tab.until("document.querySelector('#detail mark')")

async def test_a_call_tells_its_story(tab, tmp_path):
    r, lost = small(); t = build_tree(r.calls); f = write(tmp_path, r, advantages={'r': -1.25}); says = "document.getElementById('detail').textContent"
    await tab.open(f, f'#r.{lost}'); text = await tab.js(says)                           # a permalink
    assert 'same prompt: another reply was extended' in text and 'The same prompt was sent again: #4 main (accepted, continued)' in text and 'Not trained (72 tokens' in text and 'delivered' in text
    assert await tab.js("[...document.querySelectorAll('#reply span')].every((s, i) => s.classList.contains('elsewhere') || s.classList.contains('not'))")
    same = int((t.call_T[t.flat.path(t.end_C[lost], len(r.calls[lost].prompt_ids), len(r.calls[lost].prompt_ids) + 72)] != lost).sum()); assert f'{same} of them (dashed below) are trained as tokens of another call' in text
    assert await tab.js("[...document.querySelectorAll('#reply .elsewhere')].map(s => s.textContent).join('')") == Template.bytes().decode(r.calls[lost].output_ids[:same])
    await tab.click('#row4'); await tab.until(call(4)); text = await tab.js(says)
    assert 'All 76 sampled tokens are trained' in text and 'advantage -1.250' in text and 'New in the prompt: 1 messages (after 5 known from #2 main)' in text
    assert await tab.js("document.getElementById('reply').textContent") == Template.bytes().decode(r.calls[4].output_ids)
    assert await tab.js("[...document.querySelectorAll('#reply span')].every(s => s.classList.contains('train'))")
    await tab.key('j'); await tab.until(call(5)); await tab.key('k'); await tab.until(call(4)); await tab.key('h'); await tab.until(call(2))
    await tab.key('n'); await tab.until(call(lost)); await tab.key('n'); await tab.until(call(8))
    assert 'cut: nothing was kept' in await tab.js(says)
    await tab.js("location.hash = '#r.10'"); await tab.until(call(10)); text = await tab.js(says)
    assert 'A new context begins here' in text and f'{len(r.calls[7].prompt_ids) + len(r.calls[7].output_ids)} tokens of #7 main before, {len(r.calls[10].prompt_ids)} now' in text and 'after the summary by #9 compaction' in text and 'the first 1 messages are those of #1 main' in text
    await tab.key('o'); await tab.until("document.querySelector('h2').textContent === 'r'"); text = await tab.js(says)
    assert 'Fix the zebra.' in text and 'reward0' in text and 'react 1.0' in text and '-1.250' in text

async def test_tokens_and_colours(tab, tmp_path):
    r, lost = small(); t = build_tree(r.calls); adv = np.where(np.arange(len(t.ids_T)) % 2, 1., -1.); await tab.open(write(tmp_path, r, advantages={'r': adv}), '#r.4')
    look = "getComputedStyle(document.querySelector('#row4 .bar .train')).backgroundColor"; before = await tab.js(look)
    spans = "[...document.querySelectorAll('#reply span')]"
    for colour in ('role', 'log-prob', 'version', 'advantage'):
        await tab.js(pick('colour', colour)); assert await tab.js(look) != before, colour
        assert await tab.js(f"new Set({spans}.map(s => getComputedStyle(s).backgroundColor)).size") >= (2 if colour in ('log-prob', 'advantage') else 1)
    await tab.click('#each'); out = len(r.calls[4].output_ids)
    assert await tab.js(f"{spans}.length") == out
    await tab.click('#reply span:nth-child(3)'); text = await tab.js("document.getElementById('token').textContent")
    i = t.flat.path(t.end_C[4], len(r.calls[4].prompt_ids), len(r.calls[4].prompt_ids) + out)[2]
    assert f'token {t.ids_T[i]}' in text and f'log-prob {t.logprobs_T[i]:.4f}' in text and 'version 3' in text and f'advantage {adv[i]:+.3f}' in text and 'sampled by #4' in text
    await tab.key('c', 'c', 'c'); assert await tab.js(look) == before

async def test_nodes(tab, tmp_path):
    r, _ = small(); t = build_tree(r.calls); await tab.open(write(tmp_path, r)); await tab.click('#nodes')
    assert await tab.js(rows) == await tab.js(count) == t.stats['nodes']
    n = int(np.argmax(t.end_N - t.start_N)); await tab.click(f'#node{n}'); await tab.until(f"document.querySelector('h2').textContent === 'Node {n}'")
    assert await tab.js("document.querySelector('#detail .tokens').textContent") == Template.bytes().decode(t.ids_T[t.start_N[n]:t.end_N[n]])
    assert f'{t.end_N[n] - t.start_N[n]}, from depth' in await tab.js("document.querySelector('#detail table').textContent")

async def test_hostile_output_is_inert(tab, tmp_path):
    r, _ = small(EVIL[:-1]); r = replace(r, task_id=EVIL, harness=EVIL, checkpoint=EVIL, calls=tuple(replace(c, model=EVIL, role_reason=EVIL, headers={EVIL: EVIL}, finish=EVIL, tools=({'name': EVIL},)) for c in r.calls))
    q, _ = small('q'); await tab.open(write(tmp_path, r, q, title=EVIL))
    for c in r.calls:
        await tab.js(f"location.hash = '#' + encodeURIComponent({json.dumps(c.call_id)})"); await tab.until(call(c.seq))
        await tab.js("document.querySelectorAll('details').forEach(d => d.open = true)"); await tab.until("document.querySelectorAll('details').length === [...document.querySelectorAll('details')].filter(d => d.childNodes.length > 1).length")
    assert '</script><img src=x' in await tab.js("document.getElementById('detail').textContent")
    assert await tab.js("document.querySelectorAll('img, iframe, object, [onclick], [onerror]').length") == 0 and await tab.js('window.hit === undefined')
    assert await tab.js("document.querySelectorAll('script').length") == 4
    # and were something of it HTML after all, the page's own policy would stop it
    hits = []
    async def answer(reader, writer): hits.append(await reader.read(100)); writer.close()
    server = await asyncio.start_server(answer, '127.0.0.1', 0); url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x'
    await tab.js(f"""document.body.insertAdjacentHTML('beforeend', '<img src="{url}" onerror="window.hit=1">'); document.body.append(Object.assign(document.createElement('script'), {{textContent: 'window.hit = 1'}}))""")
    assert await tab.js(f"fetch('{url}').then(() => 'sent', () => 'blocked')") == 'blocked'; await tab.until('document.images[0].complete'); server.close()
    assert await tab.js('window.hit === undefined') and not hits
    assert len(tab.errors) >= 3 and all('Content Security Policy' in e for e in tab.errors); tab.errors.clear()

async def test_what_may_be_missing(tab, tmp_path):
    "No calls; calls without tokens, replies or messages; no tokenizer; a discarded rollout; a tool error."
    bare = Rollout('bare', 't', 'h', outcome='infra_fail', dropped_reason='the sandbox was lost')
    odd = Rollout('odd', 't', 'h', calls=(Call('odd.0', 'odd', 0, [], [], [], [], finish='error'), Call('odd.1', 'odd', 1, [70000, 80000], [90000], [np.nan], [-1], used={'x': float('nan')}, messages=(Message('tool', 'no such file', is_error=True),))))
    r, _ = small(); f = tmp_path/'p.html'
    f.write_text(page([(build_tree(()), bare), (build_tree(odd.calls), odd), (build_tree(r.calls, max_leaves=1), r)]).text)
    await tab.open(f); assert await tab.js(rows) == 0 and 'the sandbox was lost' in await tab.js("document.getElementById('detail').textContent")
    assert 'no reward infra_fail' in await tab.js("document.getElementById('outcome').textContent")
    await tab.key(']'); await tab.until("document.body.dataset.ready === 'odd'"); assert 'name its folder with --tokenizer' in await tab.js("document.getElementById('detail').textContent")
    assert await tab.js("[...document.querySelectorAll('.tag:not(.main)')].map(e => e.textContent)") == ['quarantined', 'tool error']
    for n in (0, 1): await tab.click(f'#row{n}'); await tab.until(call(n))
    text = await tab.js("document.getElementById('detail').textContent"); assert 'no such file' in text and '⟨90000⟩' in text
    await tab.key(']'); await tab.until("document.body.dataset.ready === 'r'"); assert 'over-branching' in await tab.js("document.getElementById('detail').textContent")
    assert (await tab.js("document.getElementById('count').textContent")).endswith(' 0 tokens trained')

async def test_the_task_and_how_it_is_graded(tab, tmp_path):
    r, _ = small(); task = Task('zebra-1', 'f', 'test', 'Paint the zebra.' + EVIL[:-1], steps=('paint zebra',), expect={'zebra.txt': 'striped'}, verifier='def verify(w, e): return 1.')
    await tab.open(write(tmp_path, r, tasks={'zebra-1': task})); says = "document.getElementById('detail').textContent"; assert 'Paint the zebra.</script><img' in await tab.js(says)
    await tab.click('#detail summary'); await tab.until(f"{says}.includes('def verify')"); text = await tab.js(says); assert 'paint zebra' in text and 'striped' in text

async def test_two_hundred_calls(tab, tmp_path):
    rng = np.random.default_rng(0); letters = np.array(list('etaoin shrdlu\n'))
    r = large(Template.bytes(), lambda n: ''.join(rng.choice(letters, n))); t = build_tree(r.calls); f = write(tmp_path, r)
    assert t.stats['calls'] == 200 and t.stats['tokens'] > 270_000 and f.stat().st_size < 1_500_000
    await tab.open(f); assert await tab.js(rows) == 200 and await tab.js("document.querySelectorAll('*').length") < 10_000
    await tab.js("go(C[199].id)"); await tab.until("document.querySelector('h2').textContent === 'Call #199'")
    await tab.js("[...document.querySelectorAll('summary')].find(s => s.textContent.startsWith('Whole prompt')).click()"); box = "document.querySelector('details[open] .tokens')"; await tab.until(box)
    prompt = Template.bytes().decode(r.calls[199].prompt_ids)
    assert (await tab.js(f"[...{box}.querySelectorAll('span')].map(s => s.textContent).join('')")) == prompt[:len(await tab.js(f"[...{box}.querySelectorAll('span')].map(s => s.textContent).join('')"))]
    while await tab.js(f"!!{box}.querySelector('button')"): await tab.js(f"{box}.querySelector('button').click()")
    assert await tab.js(f"{box}.textContent") == prompt and await tab.js("document.querySelectorAll('*').length") < 15_000

@pytest.mark.parametrize('dark', [False, True])
async def test_a_phone(tab, tmp_path, dark):
    r, _ = small(); await tab.look(390, 844, dark, True); await tab.open(write(tmp_path, r))
    await tab.js(pick('colour', 'advantage')); wide = "document.documentElement.scrollWidth <= innerWidth && document.getElementById('list').scrollWidth <= innerWidth"; assert await tab.js(wide)
    assert await tab.js("getComputedStyle(document.body).backgroundColor") == ('rgb(20, 23, 26)' if dark else 'rgb(251, 251, 249)')
    shown = lambda id: f"document.getElementById('{id}').offsetParent !== null"
    assert await tab.js(shown('list')) and not await tab.js(shown('detail'))
    await tab.click('#row2'); await tab.until("document.body.classList.contains('open')"); assert await tab.js(shown('detail')) and not await tab.js(shown('list')) and await tab.js(wide)
    await tab.click('#back'); assert await tab.js(shown('list')) and not await tab.js(shown('detail'))

async def test_from_the_store(tab, tmp_path, capfd):
    from clawlab.capture.store import Store
    with Store.open(str(tmp_path/'x.db')) as st:
        for rid, reward in (('a', 0.), ('b', 1.)):
            r, _ = small(rid, reward); st.put_rollout(replace(r, calls=(), scores={}))
            for c in r.calls: st.put_call(replace(c, messages=tuple(replace(m, content=m.content.replace('\ud800', '')) for m in c.messages)), b'{}').result()
    f = tmp_path/'t.html'; assert main(['tree', '--store', str(tmp_path/'x.db'), '--rollout', 'a', '--html', str(f)]) == 0
    out, err = capfd.readouterr(); d = json.loads(out.splitlines()[-1])
    assert d['bytes'] == f.stat().st_size and d['trees'][0]['advantage'] == pytest.approx(-1, abs=1e-4) and err.count('\n') == 14 and 'abandoned' in err
    await tab.open(f, '#a.3'); assert 'b ok 1' in await tab.js("(showRollout().map(e => e.textContent)).join('')") and 'Not trained' in await tab.js("document.getElementById('detail').textContent")
    assert main(['tree', '--store', str(tmp_path/'x.db'), '--html', str(f)]) == 0
    await tab.open(f, '#b.4'); await tab.until("document.body.dataset.ready === 'b'"); assert 'advantage +1.00' in await tab.js("document.getElementById('outcome').textContent")
    await tab.key('['); await tab.until("document.body.dataset.ready === 'a'"); assert await tab.js(rows) == 12
