"Rooms capture.templates and capture.chat, every family: published layouts, the prefix equation, parsing (faults.md 3, 4, 11, 24, 25)."
import json, time
from dataclasses import replace
from functools import cache
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from clawlab.capture.chat import Template, identify, jinja_text
from clawlab.capture.templates import CALL, CALL_END, CHATML, FORMATS, PYTHON, THINK, THINK_END, Format, kinds, parse_xml_call, tagged, tool_xml, typed, xml_call
from clawlab.capture.tokens import GPT2, O200K, PUBLISHED as PATTERNS, HFTokenizer, Mark, Remembered, Words, ascii_pattern, fuse, stretches
from clawlab.records import DataError, InputError, Message, ToolCall, message_from

PUBLISHED = json.loads((Path(__file__).parent/'published_templates.json').read_text())
TALKS = [([message_from(m) for m in t['messages']], t['tools']) for t in PUBLISHED['talks']]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

@cache
def words():
    "Byte-level BPE that merges line ends as Qwen's does."
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), 'isolated'), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator([*(t for x in PUBLISHED['formats'].values() for t in x['texts'] if t)]*2,
                            trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tok.to_str()

def bpe(f: Format):
    "`words` with the marks of a format; half of them not flagged special."
    tok = Tokenizer.from_str(words())
    marks = f.need if f.name == 'smollm2' else dict.fromkeys((*f.marks, *f.stops))
    tok.add_tokens([AddedToken(str(m), special=i < 2, normalized=False) for i, m in enumerate(marks)])
    return tok

TOKENIZERS = {n: bpe(f) for n, f in FORMATS.items()}
EACH = {f'{n}{s}': (f, kw) for n, f in FORMATS.items() for s, kw in
        [('', {})] + ([('-kept', dict(preserve_thinking=True)), ('-fast', dict(thinking=False))] if n in ('qwen3', 'qwen3.5') else [])}
BY = {'bytes': lambda f, kw: Template.bytes(f, **kw), 'bpe': lambda f, kw: Template(HFTokenizer(TOKENIZERS[f.name]), format=f, **kw)}
ALL = {f'{n}-{b}': make(f, kw) for n, (f, kw) in EACH.items() for b, make in BY.items() if b == 'bytes' or n in ('qwen3', 'qwen3-thinking', 'qwen3-coder', 'qwen3.5', 'llama3')}
each = pytest.mark.parametrize('t', ALL.values(), ids=ALL)
family = pytest.mark.parametrize('name', FORMATS)
bytes_each = pytest.mark.parametrize('t', [t for n, t in ALL.items() if n.endswith('bytes')], ids=[n for n in ALL if n.endswith('bytes')])
def eq(a, b): return np.array_equal(a, b)

# ---- published layouts

@pytest.mark.parametrize('name', PUBLISHED['formats'])
def test_text_and_tokens_are_those_of_the_published_template(name):
    "Ours is the published text, and its ids are those of that text tokenised whole; but no text merges into what a policy takes over."
    t, tok = Template(HFTokenizer(TOKENIZERS[name]), format=FORMATS[name]), TOKENIZERS[name]
    assert sum(x is not None for x in PUBLISHED['formats'][name]['texts']) >= 2
    for (messages, tools), text in zip(TALKS, PUBLISHED['formats'][name]['texts']):
        if text is None: continue
        if name == 'smollm2': messages = [replace(m, reasoning=None) for m in messages]  # its template knows no thinking; ours writes it as ChatML's
        ids = t.render(messages, tools)
        assert t.decode(ids) == Template.bytes(name).decode(Template.bytes(name).render(messages, tools)) == text
        assert ids.tolist() == tok.encode(text, add_special_tokens=False).ids

def test_published_conversations_have_edges():
    "The comparison above is about line ends and blanks at the ends of texts, several results, thinking, unusual values."
    said = [m for ms, _ in TALKS for m in ms]
    assert any(m.content[:1] == '\n' for m in said) and any(m.content[-1:] == '\n' for m in said) and any(m.reasoning for m in said)
    assert {type(v) for m in said for c in m.tool_calls for v in c.arguments.values()} >= {str, int, bool, list, type(None)}

def test_thinking_off_closes_the_block():
    t = Template.bytes('qwen3', thinking=False)
    assert t.decode(t.render([Message('user', 'a')])).endswith('<|im_start|>assistant\n<think>\n\n</think>\n\n')

# ---- the prefix equation, for every family

text = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(['<think>', '</think>', '<tool_call>', '<|im_end|>', '<|eot_id|>', '\n', '\n\n', ' ', 'a', '.', 'é', '{"', '}', '<function=x>', '[error]']), max_size=6).map(''.join))
word = st.text(st.characters(exclude_characters='>\n\r', exclude_categories=['Cs', 'Cc']), min_size=1, max_size=6)
value = st.recursive(st.none() | st.booleans() | st.integers() | text, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=5)

@st.composite
def assistant(draw, t):
    "A turn that the format can write and read back."
    f, xml, bare = t.format, 'qwen3-coder' in t.format.name or 'qwen3.' in t.format.name, f_name(t).startswith('llama3')
    a = st.dictionaries(word, text, max_size=3) if xml else st.dictionaries(text, value, max_size=3)
    def call(a): return ToolCall('', draw(word), a, json.dumps(a, ensure_ascii=False) if xml else json.dumps(a, ensure_ascii=draw(st.booleans())))
    calls = tuple(map(call, draw(st.lists(a, max_size=3))))
    content = draw(text.filter(lambda s: (not calls or s.strip() or not s) and not (bare and s.lstrip().startswith('{'))))
    think = draw(text if t.mode == 'open' else st.none() | text) if f.think and t.mode != 'closed' else None
    return Message('assistant', content, think, calls)

def f_name(t): return t.format.name
other = st.builds(Message, st.sampled_from(['system', 'user']), text) | st.builds(Message, st.just('tool'), text, is_error=st.booleans())
tools = st.lists(st.fixed_dictionaries(dict(name=word, description=text, parameters=st.fixed_dictionaries(dict(type=st.just('object'), properties=st.dictionaries(word, st.fixed_dictionaries(dict(description=text)), max_size=2))))), max_size=2)

@each
@settings(max_examples=12, deadline=None)
@given(data=st.data(), ended=st.booleans(), tools=tools)
def test_P11_prefix_equation(t, data, ended, tools):
    "render(prefix) + output + delta == render(all), results in a row included; where the template rewrites history, `delta` refuses."
    turns = st.lists(other | assistant(t), max_size=4)
    history, reply, new = data.draw(turns), data.draw(assistant(t)), data.draw(turns)
    output, k = t.reply_ids(reply, ended), len(history)
    parsed = t.parse(output)
    assert parsed.message == reply and parsed.malformed == parsed.tool_in_think == 0
    everything = [*history, parsed.message, *new]
    asks = any(m.role == 'user' for m in new)
    if not t.extends(everything, k + 1):
        assert asks and not t.preserve_thinking and t.format.think
        with pytest.raises(DataError): t.delta(everything, tools, k + 1)
    else: assert eq(t.render(everything, tools), np.concatenate([t.render(history, tools), output, t.delta(everything, tools, k + 1, ended=ended)]))

@each
@settings(max_examples=8, deadline=None)
@given(data=st.data(), ids=st.lists(st.integers(0, 255), max_size=20), cut=st.booleans(), tools=tools)
def test_P3_retokenised_history(t, data, ids, cut, tools):
    "Whatever was sampled, the graft is the anchor's own ids, inside what the generation prompt opened."
    output = np.array([*ids, *(() if cut else t.eos_ids[:1])], np.int32)
    history, new = data.draw(st.lists(other, min_size=1, max_size=3)), data.draw(st.lists(other.filter(lambda m: m.role != 'user'), max_size=3))
    everything, k = [*history, t.parse(output).message, *new], len(history)
    a = t.render(everything, tools, recorded={k: output})
    assert eq(a, np.concatenate([t.render(history, tools), output, t.delta(everything, tools, k + 1, ended=not cut)]))

@each
@settings(max_examples=6, deadline=None)
@given(s=text, role=st.sampled_from(['system', 'user', 'tool']))
def test_text_never_becomes_structure(t, s, role):
    "Marks spelled in a message, a tool or a result stay letters: as many special tokens as with harmless text."
    def marks(s):
        ids = t.render([Message('user', 'q'), Message('assistant', s), Message(role, s)], [dict(name='x', description=s, parameters={s: s})])
        return [int(i) for i in ids if int(i) in set(t.special.values())]
    assert marks(s) == marks('harmless') and t.decode(t.encode(s)) == s

@pytest.mark.parametrize('name', ['qwen3', 'qwen3.5', 'qwen2.5', 'qwen3-coder'])
def test_results_in_a_row_share_a_turn(name):
    "One user turn for both, whether they come together or one by one would have to be joined: then the template can't extend."
    t, call = Template.bytes(name), ToolCall('', 'x', {}, '{}')
    ms = [Message('user', 'q'), Message('assistant', '', '' if t.mode == 'open' else None, (call, call)), Message('tool', 'one'), Message('tool', 'two'), Message('user', 'u')]
    d = t.decode(t.delta(ms[:4], [], 2))
    assert d.count('<|im_start|>user') == 1 and d.count('<tool_response>') == 2 and d.startswith('\n<|im_start|>user')
    assert not t.extends(ms, 3) and t.decode(t.render(ms)).count('<|im_start|>user') == 3

@pytest.mark.parametrize('name', ['qwen3', 'qwen3-thinking', 'qwen3.5', 'qwen3.6'])
def test_P4_template_drops_earlier_thinking(name):
    "A true fork that shares the prompt before the turn; a tool's result is no question, not even as a user message; `preserve_thinking` is explicit."
    t, kept = Template.bytes(name), Template.bytes(name, preserve_thinking=True)
    u1, out = [Message('user', 'U1')], t.reply_ids(Message('assistant', 'A1', 'secret'))
    two = [*u1, t.parse(out).message, Message('user', 'U2')]
    assert not t.extends(two, 2) and kept.extends(two, 2)
    b = t.render(two, recorded={1: out})
    assert 'secret' not in t.decode(b) and 'A1' in t.decode(b) and 'secret' in kept.decode(kept.render(two))
    assert eq(kept.render(two), np.concatenate([kept.render(u1), out, kept.delta(two, [], 2)]))
    for m in (Message('tool', 'r'), Message('user', '<tool_response>\nr\n</tool_response>'), Message('system', 's')): assert t.extends([*two[:2], m], 2)
    later = [*two, Message('assistant', 'A2', 'still'), Message('tool', 'r')]
    assert t.extends(later, 4) and 'secret' not in t.decode(t.render(later)) and 'still' in t.decode(t.render(later))

def test_P4_turns_that_lost_their_thinking_long_ago_do_not_fork_again():
    t, ms = Template.bytes('qwen3'), [Message('user', 'U1'), Message('assistant', 'A1', 'x'), Message('user', 'U2'), Message('assistant', 'A2'), Message('user', 'U3')]
    assert t.extends(ms, 4) and not t.extends(ms, 2)

def test_thinking_off_keeps_the_closed_block_until_the_user_speaks():
    t, ms = Template.bytes('qwen3', thinking=False), [Message('user', 'U1'), Message('assistant', 'A1'), Message('tool', 'r'), Message('assistant', 'A2'), Message('user', 'U2')]
    assert t.extends(ms[:4], 2) and not t.extends(ms, 4)
    assert t.decode(t.render(ms[:4])).count('</think>') == 3 and t.decode(t.render(ms)).count('</think>') == 1

# ---- parsing

TWO = (ToolCall('', 'sh', {'cmd': 'mkdir t/{a,b"c'}, '{"cmd": "mkdir t/{a,b\\"c"}'), ToolCall('', 'sh', {'cmd': '[{"y": "}</tool_call>"}] <function=sh>'}, '{"cmd": "[{\\"y\\": \\"}</tool_call>\\"}] <function=sh>"}'))

@bytes_each
def test_P24_tool_call_parsing_at_every_cut(t):
    "Two calls in one turn, braces, quotes and look-alikes in strings: a cut reply holds exactly the calls that were complete, the rest is text."
    said = Message('assistant', '' if t.format.user else 'Go.', 'x' if t.format.think and t.mode != 'closed' else None, TWO)
    ids = t.reply_ids(said)
    assert t.parse(ids).message == said
    for n in range(len(ids)):
        r = t.parse(ids[:n])
        done = r.message.tool_calls
        assert done == TWO[:len(done)] and r.finish_tools == bool(done) and r.malformed <= 1 and r.raw == t.decode(ids[:n])
        if not t.format.user: # Llama's calls are whole or text
            assert len(done) + r.malformed == sum(p == CALL and isinstance(p, Mark) for p in t.pieces(ids[:n]))
        assert not r.malformed or r.raw.endswith(r.blocks[-1][1])  # what isn't a complete call is delivered as text

@bytes_each
@settings(max_examples=15, deadline=None)
@given(parts=st.lists(st.sampled_from([CALL, CALL_END, THINK, THINK_END, PYTHON, 'x', '\n', '{"name": "a", "arguments": {}}', '\n<function=a>\n<parameter=k>\nv\n</parameter>\n</function>\n', '{"name": "a", "parameters": {}}', ';']), max_size=10))
def test_parser_is_total_and_loses_nothing(t, parts):
    "Any row of marks and texts is read; every visible character is in a block, or is white space of the format."
    r = t.parse(t.ids([*parts, t.format.stops[0]]))
    assert r.raw == ''.join(parts) and all(k != 'text' or v for k, v in r.blocks)
    told = ''.join(v if isinstance(v, str) else 'c' for k, v in r.blocks)
    assert told.count('x') == ''.join(parts).count('x')

@pytest.mark.parametrize('t', [t for n, t in ALL.items() if t.format.think and n.endswith('bytes')], ids=[n for n, t in ALL.items() if t.format.think and n.endswith('bytes')])
def test_P25_tool_call_inside_thinking(t):
    f, (a, b) = t.format, (t.format.call(ToolCall('', x, {}, '{}')) for x in 'AB')
    head = [] if t.mode == 'open' else [THINK, f.think[0]]
    r = t.parse(t.ids([*head, 'hm ', *a, f.think[1], THINK_END, f.think[2], *b, f.stops[0]]))
    assert [c.name for c in r.message.tool_calls] == ['B'] and (r.tool_in_think, r.malformed) == (1, 0)
    assert r.message.reasoning == 'hm ' + ''.join(a) and r.message.content == ''
    r = t.parse(t.ids([*head, 'hm ', *a, f.stops[0]]))  # never closed: nothing runs
    assert not r.finish_tools and r.tool_in_think == 1
    hi = t.parse(t.encode('hi')).message
    assert hi == (Message('assistant', '', 'hi') if t.mode == 'open' else Message('assistant', 'hi'))  # the prompt says whether 'hi' is thinking

@pytest.mark.parametrize('s', ['', '<function=>\n</function>', '<function=a>', '<function=a>\n<parameter=k>\nv\n</function>', '<function=a>\n<parameter=k>\nv\n</parameter>\n',
    '<function=a>\nstray\n</function>', '<function=a>\n</function> x', 'x <function=a>\n</function>', '{"name": "a", "arguments": {}}'])
def test_malformed_xml_calls_are_text_and_counted(s):
    t = Template.bytes('qwen3-coder')
    assert parse_xml_call(s) is None
    r = t.parse(t.ids(['Go ', CALL, s, CALL_END, ' on', t.format.stops[0]]))
    assert (r.message.content, r.malformed, r.finish_tools) == (f'Go {CALL}{s}{CALL_END} on', 1, False)

TOOL = dict(name='f', parameters=dict(type='object', properties=dict(s=dict(type='string'), i=dict(type='integer'), n=dict(type='number'), b=dict(type='boolean'), a=dict(type='array'), o=dict(type='object'),
    maybe=dict(type=['string', 'null']), some=dict(anyOf=[dict(type='integer'), dict(type='null')]), ref={'$ref': '#/$defs/P'}, any={}, pick=dict(enum=[1, 2])), **{'$defs': dict(P=dict(type='object'))}))

@pytest.mark.parametrize('key,text,want', [('s', '5', '5'), ('s', 'null', 'null'), ('i', '5', 5), ('i', ' 5 ', 5), ('i', 'five', 'five'), ('i', '5.5', '5.5'), ('n', '5', 5), ('n', '1e3', 1000.0), ('n', '1e999', '1e999'), ('n', 'NaN', 'NaN'),
    ('b', 'true', True), ('b', 'True', True), ('b', '1', '1'), ('a', '[1, "x"]', [1, 'x']), ('a', '[1', '[1'), ('o', '{"k": [{}]}', {'k': [{}]}), ('maybe', 'null', None), ('maybe', '5', '5'), ('some', 'None', None), ('some', '3', 3),
    ('ref', '{"x": 1}', {'x': 1}), ('any', '5', '5'), ('pick', '2', 2), ('unknown', '5', '5'), ('s', '\nfoo\n', '\nfoo\n'), ('s', '', ''), ('i', '[' * 100000, '[' * 100000)])
def test_xml_values_get_their_types_from_the_schema(key, text, want):
    c = parse_xml_call(f'\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n', [TOOL])
    assert c.arguments == {key: want} and type(c.arguments[key]) is type(want) and json.loads(c.raw) == c.arguments

def test_odd_schemas_do_not_break_the_reading():
    loop = {'$ref': '#/$defs/L', '$defs': {'L': {'$ref': '#/$defs/L'}}}
    for bad in (None, 'x', [], {'type': 5}, {'anyOf': 'x'}, {'$ref': 'nowhere'}, {'enum': 'x'}, loop): assert typed('5', kinds(bad, loop)) == '5'
    for tool in (dict(name='f'), dict(name='f', parameters=None), dict(name='f', parameters={'properties': None}), dict(name='f', parameters={'properties': {'k': True}})):
        assert parse_xml_call('<function=f>\n<parameter=k>\n5\n</parameter>\n</function>', [tool]).arguments == {'k': '5'} and '<name>f</name>' in tool_xml(tool)

@settings(max_examples=30, deadline=None)
@given(st.dictionaries(word, st.none() | st.booleans() | st.integers() | text | st.lists(value, max_size=3), max_size=4))
def test_xml_calls_round_trip_with_a_schema(a):
    names = {type(None): 'null', bool: 'boolean', int: 'integer', str: 'string', list: 'array'}
    tool = dict(name='f', parameters=dict(properties={k: dict(type=names[type(v)]) for k, v in a.items()}))
    assert parse_xml_call(xml_call(ToolCall('', 'f', a)), [tool]).arguments == a

@pytest.mark.parametrize('s,calls,bad', [('{"name": "a", "parameters": {"x": [1]}}', 1, 0), (' {"name": "a", "arguments": {}};{"name": "b", "parameters": {}}\n', 2, 0), ('{"type": "function", "name": "a", "parameters": {}}', 1, 0),
    ('{"name": "a", "parameters": {}} and more', 0, 1), ('{"name": "a", "parameters": {}', 0, 1), ('{"name": "a", "parameters": []}', 0, 1), ('{"answer": 1}', 0, 0), ('Use {"name": "a", "parameters": {}}', 0, 0), ('', 0, 0), ('{', 0, 0)])
def test_llama_calls_are_bare_json(s, calls, bad):
    t = Template.bytes('llama3')
    r = t.parse(t.encode(s))
    assert (len(r.message.tool_calls), r.malformed) == (calls, bad) and (calls or r.message.content == s)
    tagged = t.parse(t.ids(['Say.', PYTHON, s]))
    assert len(tagged.message.tool_calls) == calls and tagged.malformed == (not calls) and tagged.message.content == ('Say.' if calls else f'Say.{PYTHON}{s}')
    assert not t.parse(t.encode(s), tools=[]).finish_tools  # a request without tools: it is an answer

@pytest.mark.parametrize('name', ['chatml', 'qwen3-coder', 'llama3'])
@pytest.mark.parametrize('unit', ['x <tool_call>', '</tool_call>', '<tool_call>{"name": "a", "arguments": {}}</tool_call>', '<tool_call><function=a>\n<parameter=k>\n', '<think></think>', '{"name": "a", "parameters": {}};', '\n', '</parameter>\n', '{"a": ['])
def test_parsing_is_linear(name, unit):
    "Ten times the reply costs about ten times the time, up to 100 kB; a quadratic parser would need a hundred times."
    t, cost = Template.bytes(name), {}
    for size in (10_000, 100_000):
        ids = t.encode(unit * (size // len(unit)), special=True)
        runs = []
        for _ in range(3): a = time.process_time(); t.parse(ids); runs.append(time.process_time() - a)
        cost[size] = min(runs)
    assert cost[100_000] < 40 * cost[10_000] + .02 and cost[100_000] < 2

# ---- which format a model speaks

QWEN = """{%- macro results(i) %}{{ '\\n<tool_response>\\n' + messages[i].content + '\\n</tool_response>' }}{% endmacro -%}
{%- set s = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools %}{{ '<|im_start|>system\\n' + (s + '\\n\\n' if s is not none else '') + PREAMBLE }}{% for x in tools %}{{ '\\n' + x|tojson }}{% endfor %}{{ AFTER + '<|im_end|>\\n' }}
{%- elif s is not none %}{{ '<|im_start|>system\\n' + s + '<|im_end|>\\n' }}{% endif -%}
{%- set q = namespace(i=-1) -%}{%- for m in messages if m.role == 'user' %}{% endfor -%}{%- for m in messages %}{% if m.role == 'user' %}{% set q.i = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ results(loop.index0) }}{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% if m.reasoning_content and loop.index0 > q.i %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\\n' if not loop.first or m.content else '' }}{{ '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments|tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}{{ '<|im_start|>assistant\\n' }}"""
SYSTEM = Template.bytes('qwen3').format.system(None, [dict(name='N')])
PREAMBLE, AFTER = ''.join(SYSTEM).split('\n{"type": "function", "function": {"name": "N"}}')
QWEN = f'{{%- set PREAMBLE = {json.dumps(PREAMBLE)} %}}{{%- set AFTER = {json.dumps(AFTER)} -%}}\n' + QWEN
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"

def test_a_chat_template_is_known_by_what_it_writes(tmp_path):
    assert identify(QWEN).name == 'qwen3' and identify(PLAIN).name == 'chatml'
    assert identify(QWEN.replace('loop.index0 > q.i', 'false')).name == 'qwen3-instruct'
    TOKENIZERS['qwen3'].save(str(tmp_path/'tokenizer.json'))
    assert Template.from_dir(tmp_path).format is CHATML  # no template at all
    (tmp_path/'tokenizer_config.json').write_text(json.dumps(dict(chat_template=[dict(name='default', template=PLAIN), dict(name='tool_use', template=QWEN)])))
    assert Template.from_dir(tmp_path).format.name == 'qwen3' and not Template.from_dir(tmp_path).preserve_thinking
    assert Template.from_dir(tmp_path, preserve_thinking=True).preserve_thinking and Template.from_dir(tmp_path, format='qwen3-coder').format.name == 'qwen3-coder'
    (tmp_path/'chat_template.jinja').write_text(PLAIN)
    assert Template.from_dir(tmp_path).format is CHATML

@pytest.mark.parametrize('source,why', [(QWEN.replace('<tool_response>\\n', '<tool_response>'), 'qwen3-instruct differs'), (PLAIN.replace('im_start', 'start'), 'no known format'), ('{{ nothing.at.all }}', 'does not run'),
    ('{% if %}', 'does not run'), ("{{ raise_exception('no') }}", 'refuses every'), (QWEN.replace("'\\n' + x|tojson", "'\\n' + x|tojson(indent=2)"), 'differs')])
def test_an_unknown_chat_template_is_refused_in_one_line(source, why):
    with pytest.raises(InputError, match=why) as e: identify(source)
    assert '\n' not in str(e.value)

def test_templates_cannot_reach_the_machine():
    with pytest.raises(InputError): identify("{{ messages.__class__.__mro__[1].__subclasses__() }}")

def test_unknown_format_and_missing_tokens():
    with pytest.raises(InputError, match='there are chatml'): Template.from_tokenizer(TOKENIZERS['qwen3'], format='klingon')
    with pytest.raises(InputError, match='<|start_header_id|>, which llama3 needs'.replace('|', r'\|')): Template.from_tokenizer(TOKENIZERS['qwen3'], format='llama3')

@family
def test_own_texts_identify_themselves(name):
    "No two formats write the probes alike, so the order of the list can't hide one behind another."
    from clawlab.capture.chat import _talk
    def writes(f): t = Template.bytes(f); return [t.decode(t.render(m, tools)) for m, tools in _talk()]
    assert [n for n, f in FORMATS.items() if writes(f) == writes(FORMATS[name])] == [name]

# ---- tokens

def test_only_new_text_is_encoded_even_when_history_is_rendered_again():
    "48 kB of system prompt and tools: encoded once, whoever renders them."
    seen = []
    class Counting(HFTokenizer):
        def _encode(self, text): seen.append(len(text)); return super()._encode(text)
    t = Template(Counting(TOKENIZERS['qwen3']), format=FORMATS['qwen3'])
    h, tool = [Message('system', 's'*48_000), Message('user', 'hi')], dict(name='x', description='d'*3000, parameters={})
    first = t.render(h, [tool]); n = sum(seen)
    again = t.render([*h, Message('assistant', 'ok'), Message('user', 'more')], [tool])
    assert sum(seen) - n < 300 and eq(again[:len(first) - 3], first[:-3]) and n > 51_000

def test_memory_is_bounded_and_threads_share_it():
    from concurrent.futures import ThreadPoolExecutor
    m = Remembered(lambda s: np.arange(len(s)), chars=5000)
    with ThreadPoolExecutor(8) as ex: list(ex.map(lambda i: m(chr(97 + i % 26) * (300 + i % 50)), range(400)))
    assert m.used == sum(len(k) + 100 for k in m._known) <= 5000 and m._known
    with pytest.raises(ValueError): m('a'*300)[0] = 1  # what is shared can't be changed

def test_seams_keep_texts_apart():
    out = fuse(['a', 'b', None, 'c', Mark('m'), 'd', '', None, None])
    assert out == ['ab', 'c', 'm', 'd'] and isinstance(out[2], Mark)

def test_nano_prompt_is_what_trained_policies_know():
    "A change of these ids makes every trained nano policy worthless."
    t = Template.bytes()
    ms = [Message('system', 'S'), Message('user', '\nU'), Message('assistant', 'A', 'T', (ToolCall('', 'b', {'c': 1}, '{"c":1}'),)), Message('tool', 'R', is_error=True), Message('tool', ''), Message('user', 'V')]
    want = ('<|im_start|>system\nS\n\n# Tools\n{"name":"b","description":"é","parameters":{"type":"object"}}<|im_end|>\n<|im_start|>user\n\nU<|im_end|>\n<|im_start|>assistant\n<think>T</think>\nA'
            '<tool_call>{"name": "b", "arguments": {"c":1}}</tool_call><|im_end|>\n<|im_start|>tool\n[error] R<|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n')
    assert t.decode(t.render(ms, [dict(name='b', description='é', parameters={'type': 'object'})])) == want
    pieces = []
    class Spy(type(t.tok)):
        def encode(self, text): pieces.append(text); return super().encode(text)
    Template(Spy()).render(ms)
    assert pieces[:9] == ['system\n', 'S', '\n', 'user\n', '\nU', '\n', 'assistant\n', 'T', '\nA']  # each text is tokenised for itself

def test_a_toy_family_is_a_record_and_a_parser():
    t = Template.bytes(replace(CHATML, name='toy', call=lambda c: [CALL, c.name, CALL_END], parse=lambda p, f, tools: tagged(p, f, tools, lambda s, tools: ToolCall('', s, {}, '{}'))))
    said = Message('assistant', 'ok', None, (ToolCall('', 'go', {}, '{}'),))
    assert t.parse(t.reply_ids(said)).message == said

def test_jinja_generation_marks_of_trainers_are_ignored():
    assert jinja_text(PLAIN.replace("{{ '<|im_start|>' + m.role", "{%- generation %}{{ '<|im_start|>' + m.role").replace("{% endfor %}", "{%- endgeneration %}{% endfor %}"), [Message('user', 'a')]) == jinja_text(PLAIN, [Message('user', 'a')])

def test_a_cut_reply_with_typed_xml_calls_is_found_in_the_history():
    "Two calls were sampled, one arrived: its tokens are kept, though `5` is a number only by the tool's schema."
    from clawlab.capture.lineage import Lineage
    from clawlab.records import Call
    t = Template.bytes('qwen3-coder'); lin, u = Lineage(t), Message('user', 'Go.')
    tool = dict(name='f', parameters=dict(properties=dict(i=dict(type='integer'))))
    calls = tuple(ToolCall(x, 'f', {'i': i}, json.dumps({'i': i})) for i, x in ((5, 'a'), (6, 'b')))
    m = lin.match((u,), (tool,))
    ids, out = lin.prompt((u,), (tool,), m)[0], t.reply_ids(Message('assistant', 'Two.', None, calls))
    reply = t.parse(out, (tool,)).message
    assert [c.arguments for c in reply.tool_calls] == [{'i': 5}, {'i': 6}]
    lin.add(Call('c0', 'r', 0, ids, out, np.zeros(len(out)), np.zeros(len(out)), messages=(u,), tools=(tool,), response=reply), m)
    lin.set_delivered('c0', ('yes', 'yes', 'no'))
    history = (u, replace(reply, tool_calls=reply.tool_calls[:1]), Message('tool', 'r'))
    m = lin.match(history, (tool,))
    ids2, _ = lin.prompt(history, (tool,), m)
    n = next(i for i, (a, b) in enumerate(zip([*ids, *out], ids2)) if a != b)
    assert m.anchor_id == 'c0' and t.decode(ids2[:n]).rstrip().endswith('5\n</parameter>\n</function>\n</tool_call>') and t.decode(ids2[n:]).startswith('<|im_end|>\n<|im_start|>user\n<tool_response>')

# words

@cache
def cut_by(pattern):
    "(Our tokenizer, the library's) with words cut by a pattern; None: as ByteLevel does."
    spec, level = json.loads(words()), dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=pattern is None)
    spec['pre_tokenizer'] = level if pattern is None else dict(type='Sequence', pretokenizers=[dict(type='Split', pattern=dict(Regex=pattern), behavior='Isolated', invert=False), level])
    tok = Tokenizer.from_str(json.dumps(spec))
    return HFTokenizer(tok), tok

code = st.lists(st.one_of(st.text(st.characters(max_codepoint=126, min_codepoint=32, include_characters='\n\t\r'), max_size=8), st.sampled_from(
    ["'s", "'LL", ' ', '  ', '\n', '\r\n', '\t', 'getItem', 'XMLHttp', '42', '1234567', '","', '/n\n', "it're", 'é', '\x1c', '\x00', '\u3000', 'ſ', '٣'])), max_size=30).map(''.join)

@pytest.mark.parametrize('pattern', [None, *sorted(PATTERNS)])
@settings(max_examples=400)
@given(text=code)
def test_words_that_are_remembered_are_the_library_s(pattern, text):
    ours, tok = cut_by(pattern)
    want = tok.encode(text, add_special_tokens=False).ids
    assert ours._encode(text).tolist() == want
    if text.isascii() and text.isprintable() and text: assert ours._words.encode(text).tolist() == want, 'plain text is ours'

def test_words_are_left_to_the_library_where_a_tokenizer_looks_further():
    spec = json.loads(cut_by(SPLIT)[1].to_str())
    first, tok = spec['pre_tokenizer']['pretokenizers'][0], Tokenizer.from_str(json.dumps(spec))
    split = lambda **kw: dict(spec, pre_tokenizer=dict(spec['pre_tokenizer'], pretokenizers=[{**first, **kw}, spec['pre_tokenizer']['pretokenizers'][1]]))
    for other in (split(behavior='Removed'), split(invert=True), split(pattern=dict(String=' ')), split(pattern=dict(Regex=r'\S+ ?|\s+')), split(pattern=dict(Regex=SPLIT + '+')),
                  dict(spec, normalizer=dict(type='Lowercase')), dict(spec, normalizer=dict(type='NFKC')), dict(spec, model=dict(spec['model'], dropout=.1)), dict(spec, pre_tokenizer=None),
                  dict(spec, pre_tokenizer=dict(type='ByteLevel', add_prefix_space=True, trim_offsets=True, use_regex=True))):
        assert Words.of(tok, other) is None
    assert {SPLIT, SPLIT.replace(r'\p{N}|', r'\p{N}{1,3}|'), O200K} < PATTERNS and Words.of(tok, spec) is not None
    assert list(stretches('a é b')) == [('a', True), (' é', False), (' b', True)] and list(stretches('é  b')) == [('é', False), ('  b', True)] and list(stretches('  é')) == [('  é', False)]
    tok = Tokenizer.from_str(words()); tok.add_tokens([AddedToken('hello', special=False, normalized=False)])
    t = HFTokenizer(tok)
    assert t._words is None and t._encode('say hello').tolist() == tok.encode('say hello', add_special_tokens=False).ids
    assert ascii_pattern(GPT2).findall('a  b') == ['a', ' ', ' b']

def test_words_kept_are_bounded():
    t, tok = cut_by(SPLIT)
    t._words.most = 50
    for i in range(200): assert t._encode(f' w{i} {"x"*(i % 90)}').tolist() == tok.encode(f' w{i} {"x"*(i % 90)}', add_special_tokens=False).ids
    assert len(t._words) <= 50 and max(map(len, t._words)) <= 40

@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 505), max_size=12))
def test_ids_are_spelled_as_the_library_spells_them(ids):
    ours, tok = cut_by(SPLIT)
    assert ours.decode(ids) == tok.decode(ids, skip_special_tokens=False)

def test_added_words_are_spelled_as_they_stand():
    tok = Tokenizer.from_str(words()); tok.decoder = decoders.ByteLevel(); tok.add_tokens([AddedToken('two words', special=False), AddedToken('Ġodd', special=False), AddedToken('<|x|>', special=True)])
    t, ids = HFTokenizer(tok), [65, tok.token_to_id('two words'), tok.token_to_id('Ġodd'), 66, 10**6]
    assert t.decode(ids) == tok.decode(ids, skip_special_tokens=False) and 'two words' in t.decode(ids)
