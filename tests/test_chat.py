"Room capture.chat: the prefix equation, parsing over ids, injection (faults.md 2-4, 11, 24, 25)."
import json
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from clawlab.capture.chat import CALL, CALL_END, END, SPECIALS, START, THINK, THINK_END, Mark, Template, parse_call
from clawlab.records import DataError, InputError, Message, ToolCall

CORPUS = ['You are an agent. list the files, write the report and read it back.', '{"name": "bash", "arguments": {"command": "ls -la notes/"}}'] * 3

def bpe(control=SPECIALS, words=()):
    "Byte-level BPE trained on a few lines. `control`: which marks are tokens; half of them not flagged special, as Qwen3 has it."
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_tokens([AddedToken(str(t), special=i < 2, normalized=False) for i, t in enumerate(control)])
    tok.add_tokens([AddedToken(w, single_word=True, normalized=False) for w in words])
    return Template.from_tokenizer(tok)

TEMPLATES = {'bytes': Template.bytes(), 'bpe': bpe(), 'words': bpe(words=('report', 'notes')), 'spelled': bpe(SPECIALS[:2])}
each = pytest.mark.parametrize('t', TEMPLATES.values(), ids=TEMPLATES.keys())
exact = pytest.mark.parametrize('t', [t for k, t in TEMPLATES.items() if k != 'spelled'], ids=[k for k in TEMPLATES if k != 'spelled'])

# text that likes to look like structure
text = st.one_of(st.text(max_size=20), st.lists(st.sampled_from([*map(str, SPECIALS), '\n', ' ', 'report', 'é', '{"', '}', '\\', 'a', '[error]', '# Tools']), max_size=6).map(''.join))
value = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
                     lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=6)
args = st.dictionaries(text, value, max_size=3)

@st.composite
def tool_call(draw):
    a = draw(args)
    raw = json.dumps(a, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(', ', ': '), (',', ':'), (' ,\n', ' :\t')])))
    return ToolCall('', draw(text.filter(bool)), a, raw)

@st.composite
def assistant(draw):
    calls = tuple(draw(st.lists(tool_call(), max_size=3)))
    content = draw(text.filter(lambda s: not calls or s.strip() or not s))  # blank text beside calls is dropped
    return Message('assistant', content, draw(st.none() | text), calls)

other = st.builds(Message, st.sampled_from(['system', 'user']), text) | st.builds(Message, st.just('tool'), text, is_error=st.booleans())
tools = st.lists(st.fixed_dictionaries(dict(name=text, description=text, parameters=args)), max_size=2)

def eq(a, b): return np.array_equal(a, b)

@exact
@settings(max_examples=120, deadline=None)
@given(history=st.lists(other | assistant(), max_size=4), reply=assistant(), new=st.lists(other | assistant(), max_size=3), tools=tools, ended=st.booleans())
def test_P11_prefix_equation(t, history, reply, new, tools, ended):
    "render(prefix) + output + delta == render(all); the separator, and after a length stop the end of turn, are in the delta."
    output = t.reply_ids(reply, ended)
    parsed = t.parse(output)
    assert parsed.message == reply and parsed.malformed == parsed.tool_in_think == 0
    everything = [*history, parsed.message, *new]
    a = t.render(everything, tools)
    assert a.dtype == np.int32 and eq(a, np.concatenate([t.render(history, tools), output, t.delta(everything, tools, len(history) + 1, ended=ended)]))

@each
@settings(max_examples=60, deadline=None)
@given(history=st.lists(other, min_size=1, max_size=3), ids=st.lists(st.integers(0, 255), max_size=30), cut=st.booleans(), new=st.lists(other, max_size=3), tools=tools)
def test_P3_retokenised_history(t, history, ids, cut, new, tools):
    "Whatever was sampled, the graft is the anchor's own ids."
    output = np.array([*ids, *(() if cut else t.eos_ids)], np.int32)
    everything, k = [*history, t.parse(output).message, *new], len(history)
    a = t.render(everything, tools, recorded={k: output})
    assert eq(a, np.concatenate([t.render(history, tools), output, t.delta(everything, tools, k + 1, ended=not cut)]))

@each
@settings(max_examples=100, deadline=None)
@given(s=text, m=other)
def test_text_never_becomes_structure(t, s, m):
    special = set(t.special.values())
    assert t.decode(t.encode(s)) == s and not set(t.encode(s).tolist()) & special
    ids = t.render([m], [dict(name=s, description=s, parameters={s: s})])
    heads = sum(int(i) == t.special[START] for i in ids)
    assert heads == (2 if m.role == 'system' else 3)
    assert not set(ids.tolist()) & (special - {t.special[START], t.special[END]})

def test_lone_surrogates_are_text():
    for t in TEMPLATES.values(): assert t.decode(t.encode('a\ud800b')) == 'a?b'

def test_words_stay_single_tokens():
    t = TEMPLATES['words']
    assert len(t.encode('report')) == 1 and t.decode(t.encode('the report')) == 'the report'

def test_tokenizer_that_finds_control_tokens_in_text_is_refused():
    tok = Tokenizer(models.WordLevel(vocab={'<|im_start|>': 0, '<|im_end|>': 1, 'x': 2}, unk_token='x'))
    tok.add_special_tokens(['<|im_start|>', '<|im_end|>'])
    with pytest.raises(InputError, match='plain text'): Template.from_tokenizer(tok)

# ---- parsing

CALLS = ['{"name":"sh","arguments":{"cmd":"mkdir t/{a,b\\"c"}}', '{"name": "sh", "arguments": {"x": [{"y": "}</tool_call>"}], "z": "[{"}}']

@each
def test_P24_tool_call_parsing_at_every_cut(t):
    "Two calls with braces, quotes and look-alikes inside strings; a cut reply holds exactly the calls that were complete."
    if CALL not in t.special: pieces = [CALL, CALLS[0], CALL_END, CALL, CALLS[0], CALL_END]  # spelled marks: look-alikes are marks
    else: pieces = [CALL, CALLS[0], CALL_END, CALL, CALLS[1], CALL_END]
    ids = t.ids(pieces)
    whole = t.parse(ids).message.tool_calls
    assert [c.arguments for c in whole] == [json.loads(pieces[1])['arguments'], json.loads(pieces[4])['arguments']]
    assert whole[0].raw == '{"cmd":"mkdir t/{a,b\\"c"}'
    for n in range(len(ids)):
        r = t.parse(ids[:n])
        calls = r.message.tool_calls
        assert calls == whole[:len(calls)] and r.raw == t.decode(ids[:n]) and r.finish_tools == bool(calls)
        rest = r.raw[sum(len(CALL + p + CALL_END) for p in [pieces[1], pieces[4]][:len(calls)]):]
        assert r.message.content == rest  # what isn't a complete call is delivered as text
        assert r.malformed == (rest.startswith(CALL))

@pytest.mark.parametrize('s', ['', '{}', '[]', 'null', '{"name": "a"}', '{"name": 1, "arguments": {}}', '{"name": "", "arguments": {}}', '{"name": "a", "arguments": []}',
    '{"name": "a", "arguments": "{}"}', '{"name": "a", "arguments": {}', '{"name": "a", "arguments": {}} x', '{"name": "a", "arguments": {},}', "{'name': 'a', 'arguments': {}}",
    '{"name": "a", "arguments": {"x": NaN}}', '{"name": "a", "arguments": {"x": 1e999}}', '{"name": "a", "arguments": {"x": "\\ud800"}}', '{"name": "a" "arguments": {}}',
    '{"name": "a", "arguments": {"x": "line\nbreak"}}', '{"name": "a", "arguments": ' + '[' * 100000, '{"name": "a", "arguments": {"x": 1' + '0' * 5000 + '}}'])
def test_malformed_calls_are_text_and_counted(s):
    assert parse_call(s) is None
    t = Template.bytes()
    r = t.parse(t.ids(['Go ', CALL, s, CALL_END, ' on', END]))
    assert (r.message.content, r.malformed, r.finish_tools) == (f'Go {CALL}{s}{CALL_END} on', 1, False)

@pytest.mark.parametrize('s', [' {"arguments" : {"a": 1} , "name" : "b", "id": null}\n', '{"name": "x", "name": "b", "arguments": {"a":1.0}}', '{"name":"b","arguments":{"a":1}}'])
def test_wellformed_calls(s): assert (c := parse_call(s)).name == 'b' and c.arguments == {'a': 1} == json.loads(c.raw)

@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(SPECIALS) | st.sampled_from([CALLS[0], 'x', '\n']), max_size=12))
def test_parser_is_total_and_loses_no_call(pieces):
    t = Template.bytes()
    r = t.parse(t.ids([*pieces, END]))
    assert r.raw == ''.join(pieces)
    marks, inside, opened, stray, live = pieces, False, 0, 0, False
    for p in marks:  # an independent count: every call opened outside thinking is delivered or counted
        if not isinstance(p, Mark): continue
        if inside: inside = p != THINK_END
        elif p == CALL: opened += 1; live = True
        elif p == CALL_END: stray += not live; live = False
        elif p == THINK and not live: inside = True
    assert len(r.message.tool_calls) + r.malformed == opened + stray
    assert all(k != 'text' or v for k, v in r.blocks)

@each
def test_P25_tool_call_inside_thinking(t):
    a, b = (f'{{"name": "{x}", "arguments": {{}}}}' for x in 'AB')
    r = t.parse(t.ids([THINK, 'hm ', CALL, a, CALL_END, THINK_END, CALL, b, CALL_END, END]))
    assert [c.name for c in r.message.tool_calls] == ['B'] and (r.tool_in_think, r.malformed) == (1, 0)
    assert r.message.reasoning == f'hm {CALL}{a}{CALL_END}' and r.message.content == ''
    r = t.parse(t.ids([THINK, 'hm ', CALL, a, CALL_END, END]))  # never closed: nothing runs
    assert not r.finish_tools and r.tool_in_think == 1
    assert t.parse(t.encode('hi')).message == Message('assistant', 'hi')

def test_spelled_marks_in_plain_letters_are_text():
    t = Template.bytes()
    s = f'{THINK}x{THINK_END}{CALL}{CALLS[0]}{CALL_END}'
    assert t.parse(t.encode(s)).message == Message('assistant', s)
    assert t.parse(t.encode(s, special=True)).finish_tools

def test_P2_ids_without_visible_text_count():
    t = Template.bytes()
    ids = t.ids([THINK, THINK_END, CALL, '{}', CALL_END, END])
    assert len(ids) == 7 and eq(t.encode(t.decode(ids), special=True), ids)

def test_interleaved_blocks_keep_their_order():
    t = Template.bytes()
    r = t.parse(t.encode(f'<think>a</think>\nb<think>c</think>\n<tool_call>{CALLS[0]}</tool_call>\n\nd<tool_call>{CALLS[0]}</tool_call>', special=True))
    assert [k for k, _ in r.blocks] == ['thinking', 'text', 'thinking', 'tool', 'text', 'tool']
    assert (r.message.reasoning, r.message.content) == ('a\nc', 'b\n\n\nd')

# ---- templates that forget, errors

def test_P4_template_drops_earlier_thinking():
    t = Template(Template.bytes().tok, preserve_thinking=False)
    u1, out = [Message('user', 'U1')], t.reply_ids(Message('assistant', 'A1', 'x'))
    two = [*u1, t.parse(out).message, Message('user', 'U2')]
    assert not t.extends(two, 2)
    with pytest.raises(DataError): t.delta(two, [], 2)
    a, b = np.concatenate([t.render(u1), out]), t.render(two, recorded={1: out})
    n = next(i for i in range(len(a)) if a[i] != b[i])
    assert n == len(t.render(u1)) and 'x' not in t.decode(b)
    tool = [*two[:2], Message('tool', 'r')]  # tool results don't end the user's turn
    assert t.extends(tool, 2) and eq(t.render(tool), np.concatenate([a, t.delta(tool, [], 2)]))

def test_P30_system_message_in_the_middle_stays_there():
    t = Template.bytes()
    ms = [Message('user', 'a'), Message('system', 'S'), Message('user', 'b')]
    s = t.decode(t.render(ms, [dict(name='x', parameters={})]))
    assert s.index('# Tools') < s.index('user\na') < s.index('system\nS') < s.index('user\nb')

def test_errors_are_visible_to_the_model():
    t = Template.bytes()
    assert '[error] boom' in t.decode(t.render([Message('tool', 'boom', is_error=True)]))

def test_unknown_role():
    with pytest.raises(InputError, match='king'): Template.bytes().render([Message('king', '')])
