"""What a request continues, whatever a harness does to its history (faults P, items by number)."""
import json, random
from dataclasses import replace
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from clawlab.capture import lineage
from clawlab.capture.chat import Bytes, Template
from clawlab.capture.dialects import anthropic, chat, responses
from clawlab.capture.dialects.base import tool_id
from clawlab.capture.lineage import Lineage, message_key
from clawlab.learn.tree import build_tree
from clawlab.records import Call, Message, ToolCall

SH = (dict(name='sh', description='Run', parameters={'type': 'object'}),)
GREP = (dict(name='grep', description='Find', parameters={'type': 'object'}),)
S, U = Message('system', 'You act.'), Message('user', 'Go.')
T = Template.bytes()

class Talk:
    "A session that plays both sides: `say` samples a reply for a request."
    def __init__(self, template=T): self.t, self.lin, self.calls = template, Lineage(template), {}
    def say(self, messages, out, tools=SH, delivered=('yes',), eos=True, add=True, **kw):
        m = self.match = self.lin.match(messages, tools)
        ids, drift = self.lin.prompt(messages, tools, m)
        out = np.asarray(self.t.encode(out, special=True) if isinstance(out, str) else out)
        if eos: out = np.concatenate([out, self.t.eos_ids[:1]])
        cid = f'c{len(self.calls)}'
        reply = self.t.parse(out).message
        reply = replace(reply, tool_calls=tuple(replace(c, id=tool_id('call_', cid, i)) for i, c in enumerate(reply.tool_calls)))
        c = Call(cid, 'r', len(self.calls), ids, out, np.zeros(len(out)), np.zeros(len(out)), 'stop' if eos else 'length', m.parent_id, m.anchor_id,
                 messages=tuple(messages), tools=tuple(tools), response=reply, drift=drift, delivered=(), **kw)
        c = replace(c, **dict(zip(('role', 'role_reason'), self.lin.role(c, m))))
        self.calls[cid] = c
        if add: self.lin.add(c, m); self.lin.set_delivered(cid, delivered)
        return c

def extends(c, d):
    "Prompt of d = prompt and output of c, then more."
    both = np.concatenate([c.prompt_ids, c.output_ids])
    return len(d.prompt_ids) > len(both) and np.array_equal(d.prompt_ids[:len(both)], both)

def tool(cmd, **kw): return f'<tool_call>{{"name": "sh", "arguments": {json.dumps({"cmd": cmd}, **kw)}}}</tool_call>'
def result(c, text): return Message('tool', text, tool_call_id=c.response.tool_calls[0].id)

class Pairs(Bytes):
    "Bytes, and one merge: the tokenizer says 300 for 'ab', a policy may as well sample 'a', 'b'."
    size = 301
    def encode(self, text):
        out = [int(i) for i in Bytes.encode(self, text)]
        while p := [k for k in range(len(out) - 1) if out[k:k+2] == [97, 98]]: out[p[0]:p[0]+2] = [300]
        return np.array(out, np.int32)
    def decode(self, ids): return Bytes.decode(self, [j for i in ids for j in ([97, 98] if i == 300 else [i])])

def test_P3_retokenised_history():
    k = Talk(Template(Pairs()))
    a = k.say((S, U), [97, 98])
    b = k.say((S, U, Message('assistant', 'ab'), Message('user', 'more')), 'ok')
    assert k.t.encode('ab').tolist() == [300] and a.response.content == 'ab'
    assert extends(a, b) and (b.parent_id, b.anchor_id, b.drift) == ('c0', 'c0', 1)
    c = k.say((*b.messages, b.response, U), [300])
    assert extends(b, c) and c.drift == 0

def test_P4_template_that_drops_thinking_forks():
    k = Talk(Template(Bytes(), preserve_thinking=False))
    a = k.say((S, U), '<think>hm</think>\nA1')
    b = k.say((S, U, replace(a.response, reasoning=None), Message('user', 'next')), 'A2')   # most harnesses drop it too
    n = len(a.prompt_ids)
    assert b.parent_id == 'c0' and b.anchor_id is None
    np.testing.assert_array_equal(b.prompt_ids[:n], a.prompt_ids)
    assert b.prompt_ids[n] != a.output_ids[0] and 'hm' not in k.t.decode(b.prompt_ids)
    kept = Talk()
    a = kept.say((S, U), '<think>hm</think>\nA1')
    assert extends(a, kept.say((S, U, replace(a.response, reasoning=None), Message('user', 'next')), 'A2'))

def test_P1_volatile_nonce_in_the_system_prompt():
    "Two bodies that differ in the nonce and one turn are one chain; a user who quotes the line keeps it."
    k = Talk(); line = 'x-anthropic-billing-header: cc_version=2.1.332.%s; cc_entrypoint=sdk-cli;'
    ask = lambda nonce, *ms: anthropic.parse_request(dict(model='m', max_tokens=9, system=[dict(type='text', text=line % nonce), dict(type='text', text='You act.')], messages=list(ms)))
    quote = dict(role='user', content=line % 'abc')
    one, two = ask('a1f', quote), ask('0c4', quote, dict(role='assistant', content=[dict(type='text', text='ok')]), dict(role='user', content='and now?'))
    a = k.say(one.messages, 'ok'); b = k.say(two.messages, 'ok')
    assert extends(a, b) and b.role == 'main' and T.decode(b.prompt_ids).count('billing-header') == 1

def test_P25_a_call_inside_thinking_is_a_thought():
    k = Talk()
    a = k.say((S, U), '<think>try ' + tool('rm') + '</think>' + tool('ls'))
    assert [c.arguments for c in a.response.tool_calls] == [{'cmd': 'ls'}]
    for r in (a.response, replace(a.response, reasoning=None), replace(a.response, reasoning=' try')):
        assert extends(a, k.say((S, U, r, result(a, 'x')), 'y'))
    ran_both = replace(a.response, tool_calls=(ToolCall('', 'sh', {'cmd': 'rm'}), *a.response.tool_calls))
    assert k.lin.match((S, U, ran_both), SH).parent is None

def test_P4_within_one_user_turn_thinking_stays():
    k = Talk(Template(Bytes(), preserve_thinking=False))
    a = k.say((S, U), '<think>hm</think>' + tool('ls'))
    assert extends(a, k.say((S, U, replace(a.response, reasoning=None), result(a, 'x')), 'A2'))

def test_P8_interleaved_subagents():
    k = Talk(); s2 = Message('system', 'You search.')
    p1 = k.say((S, U), tool('a')); h = (S, U, p1.response, result(p1, '1'))
    c1 = k.say((s2, U), tool('b'), GREP); g = (s2, U, c1.response, result(c1, '2'))
    p2 = k.say(h, tool('c')); h += (p2.response, result(p2, '3'))
    c2 = k.say(g, 'found', GREP)
    p3 = k.say(h, 'done')
    assert [c.parent_id for c in (p1, p2, p3)] == [None, 'c0', 'c2'] and [c.parent_id for c in (c1, c2)] == [None, 'c1']
    assert extends(p2, p3) and extends(c1, c2)
    assert [c.role for c in (p1, c1, p2, c2, p3)] == ['main', 'subagent', 'main', 'subagent', 'main']

def test_P9_retry_then_the_delivered_attempt_goes_on():
    k = Talk()
    k.say((S, U), [53, 54], delivered=('no',))
    b = k.say((S, U), [53, 55])
    c = k.say((S, U, b.response, U), 'x')
    assert b.parent_id is None and c.parent_id == 'c1' and extends(b, c)

def test_P9_equal_replies_prefer_the_delivered_then_the_latest():
    k = Talk()
    for d in ('no', 'yes', 'yes', 'no'): k.say((S, U), 'same', delivered=(d,))
    m = k.lin.match((S, U, Message('assistant', 'same'), U), SH)
    assert m.parent_id == 'c2' and m.ambiguous

def test_twins_are_told_apart_by_tool_ids():
    "Parallel identical requests with identical replies: the id that comes back says which one it was."
    k = Talk()
    one, two = k.say((S, U), tool('ls')), k.say((S, U), tool('ls'))
    for c in (one, two):
        m = k.lin.match((S, U, c.response, result(c, 'x')), SH)
        assert m.parent_id == c.call_id and not m.ambiguous
    stripped = replace(one.response, tool_calls=tuple(replace(t, id=t.id.replace('_', '')) for t in one.response.tool_calls))
    assert k.lin.match((S, U, stripped, result(one, 'x')), SH).parent_id == 'c0'

def test_P11_separator_after_end_of_turn():
    k = Talk()
    a = k.say((S, U), 'hi'); b = k.say((S, U, a.response, U), 'ho')
    rest = b.prompt_ids[len(a.prompt_ids) + len(a.output_ids):]
    assert a.output_ids[-1] == T.eos_ids[0] and T.decode(rest).startswith('\n<|im_start|>user')
    cut = k.say((*b.messages, b.response, U), 'half', eos=False)
    d = k.say((*cut.messages, cut.response, U), 'x')
    rest = d.prompt_ids[len(cut.prompt_ids) + len(cut.output_ids):]
    assert extends(cut, d) and T.decode(rest).startswith('<|im_end|>\n<|im_start|>user')

def test_P27_json_arguments_are_compared_as_values():
    k = Talk()
    a = k.say((S, U), '<tool_call>{"name": "sh", "arguments": {"b": 1, "a": "é/"}}</tool_call>')
    raw = r'{"a":"\u00e9\/","b":1.0}'
    again = replace(a.response, tool_calls=(ToolCall('other', 'sh', json.loads(raw), raw),))
    b = k.say((S, U, again, Message('tool', 'x')), 'y')
    assert b.parent_id == 'c0' and extends(a, b) and b.drift == 1
    other = replace(a.response, tool_calls=(ToolCall('other', 'sh', {'b': 2}, '{"b":2}'),))
    assert k.lin.match((S, U, other, Message('tool', 'x')), SH).parent_id is None

@pytest.mark.parametrize('one,two,same', [('1', '1.0', 1), ('1', 'true', 0), ('1', '"1"', 0), ('0', '-0.0', 1), ('1e21', '1000000000000000000000', 1), ('0.1', '1e-1', 1),
    ('12345678901234567890', '12345678901234567000', 1), ('9007199254740991', '9007199254740990', 0), ('1' + '0'*400, '1' + '0'*401, 0), ('null', '""', 0), ('[]', '{}', 0),
    ('{"x": [1, {"y": 2.0}]}', '{"x":[1.0,{"y":2}]}', 1), ('"é/"', r'"\u00e9\/"', 1), ('[1, 2]', '[2, 1]', 0)])
def test_P27_numbers_and_nesting(one, two, same):
    of = lambda raw: Message('assistant', tool_calls=(ToolCall('', 'sh', {'v': json.loads(raw)}, raw),))
    assert (message_key(of(one)) == message_key(of(two))) == bool(same)

@pytest.mark.parametrize('change', ['trim', 'sorted', 'ids', 'no reasoning', 'null', 'list'])
def test_what_harnesses_do_to_a_reply_keeps_the_chain(change):
    k = Talk()
    a = k.say((S, U), '<think> why </think>\n  text \n' + tool('ls', separators=(' , ', ' : ')))
    r, c = a.response, a.response.tool_calls[0]
    r = {'trim': replace(r, content=r.content.strip()), 'no reasoning': replace(r, reasoning=None), 'null': replace(r, reasoning=' why'),
         'ids': replace(r, tool_calls=(replace(c, id='zz'),)), 'sorted': replace(r, tool_calls=(replace(c, raw='{"cmd":"ls"}'),)), 'list': r}[change]
    b = k.say((S, U, r, Message('tool', 'x')), 'y')
    assert extends(a, b) and b.parent_id == 'c0'

def test_empty_reply_placeholder():
    k = Talk()
    a = k.say((S, U), '')
    for d, msg in ((chat, dict(role='assistant', content='(empty)')), (anthropic, dict(role='assistant', content=[dict(type='text', text='(empty)')]))):
        req = d.parse_request(dict(model='m', max_tokens=5, messages=[dict(role='user', content='x'), msg, dict(role='user', content='y')]))
        assert message_key(req.messages[1]) == message_key(a.response)
        assert k.lin.match((S, U, req.messages[1], U), SH).anchor_id == 'c0'

def test_P30_system_message_in_the_middle_stays_in_place():
    k = Talk(); mid = Message('system', 'Date: Monday')
    a = k.say((S, U), tool('ls'))
    b = k.say((S, U, a.response, result(a, 'x'), mid), tool('pwd'))
    c = k.say((*b.messages, b.response, result(b, 'y')), 'z')
    assert extends(a, b) and extends(b, c) and T.decode(c.prompt_ids).count('system\n') == 2

def test_moving_reminder_keeps_the_lineage_and_forks_the_tokens():
    "OpenClaw: the last message is sent again at the end of each request and never kept."
    k = Talk(); h, prev = (S, U), None
    for i in range(6):
        c = k.say((*h, Message('user', f'<reminder {i}>')), tool(f'cmd {i}'))
        assert c.parent_id == prev
        if i > 1:
            assert c.anchor_id is None
            shown = T.decode(c.prompt_ids)
            assert f'<reminder {i-1}>' not in shown and all(f'cmd {j}' in shown for j in range(i))
        h, prev = (*h, c.response, result(c, str(i))), c.call_id
    assert len({c.parent_id for c in k.calls.values()}) == 6   # one leaf

def test_edited_tool_result_keeps_the_lineage():
    "Claude Code writes a reminder into the last tool result when a reply was empty."
    k = Talk()
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x')), '')
    edited = Message('tool', 'x\n<system-reminder>empty</system-reminder>')
    c = k.say((S, U, a.response, edited, b.response, U), 'ok')
    assert c.parent_id == 'c1' and c.anchor_id == 'c0' and extends(a, c)

def test_tools_that_change_move_the_anchor_not_the_lineage():
    k = Talk()
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x')), tool('pwd'), (*SH, *GREP))
    c = k.say((*b.messages, b.response, result(b, 'y')), 'z', (*SH, *GREP))
    assert (b.parent_id, b.anchor_id, c.parent_id, c.anchor_id) == ('c0', None, 'c1', 'c1')
    assert b.role == 'main' and a.output_ids.tobytes() in b.prompt_ids.tobytes()   # the reply's ids were grafted

def test_cut_reply_keeps_the_blocks_that_arrived():
    "Claude Code keeps completed blocks of a stream that broke: their tokens stay, the rest is left."
    k = Talk()
    a = k.say((S, U), 'Look first.' + tool('ls') + tool('pwd'), delivered=('yes', 'unknown', 'no'))
    kept = Message('assistant', 'Look first.')
    b = k.say((S, U, kept, Message('user', 'You were cut off.')), 'x')
    assert (b.parent_id, b.anchor_id) == ('c0', 'c0')
    n = len(a.prompt_ids) + len(T.encode('Look first.'))
    np.testing.assert_array_equal(b.prompt_ids[:n], np.concatenate([a.prompt_ids, a.output_ids])[:n])
    assert T.decode(b.prompt_ids[n:]).startswith('<|im_end|>\n<|im_start|>user\nYou were')
    two = replace(kept, tool_calls=a.response.tool_calls[:1])
    c = k.say((S, U, two, result(a, 'f')), 'y')
    assert c.anchor_id == 'c0' and T.decode(c.prompt_ids).count('<tool_call>') == 1 and c.drift == 0
    whole = k.say((S, U, a.response, result(a, 'f'), result(a, 'g')), 'z')
    assert extends(a, whole)

@pytest.mark.parametrize('joined', [False, True])
def test_cut_reply_then_a_second_assistant_message(joined):
    "Codex keeps the item that arrived; the retry ends with it, and its reply stands behind it, apart or joined to it."
    k = Talk()
    a = k.say((S, U), 'Look first.' + tool('ls') + tool('pwd'), delivered=('yes', 'unknown'))
    kept = Message('assistant', 'Look first.')
    b = k.say((S, U, kept), 'Again.' + tool('cat'))
    assert (b.parent_id, b.anchor_id) == ('c0', 'c0') and b.drift == 0
    both = (Message('assistant', 'Look first.\nAgain.', tool_calls=b.response.tool_calls),) if joined else (kept, b.response)
    c = k.say((S, U, *both, result(b, 'x')), 'done')
    assert (c.parent_id, c.anchor_id, c.drift) == ('c1', 'c1', 0) and extends(b, c)
    t = build_tree([replace(x, delivered=d) for x, d in zip((a, b, c), (('yes', 'unknown'), ('yes',)*2, ('yes',)))])
    assert t.stats['lineage_leaves'] == 1 and t.kept_C.tolist() == [len('Look first.'), len(b.output_ids), len(c.output_ids)]

def test_a_call_executed_though_the_stream_never_ended():
    "Every item arrived, response.completed did not: the whole reply goes on."
    k = Talk()
    a = k.say((S, U), 'Look.' + tool('ls'), delivered=('yes', 'yes'))
    assert extends(a, k.say((S, U, a.response, result(a, 'x')), 'y'))
    two = k.say((S, U), 'Two.' + tool('a') + tool('b'), delivered=('yes', 'yes', 'no'))
    first = replace(two.response, tool_calls=two.response.tool_calls[:1])
    c = k.say((S, U, first, result(two, 'x')), 'y')
    assert (c.parent_id, c.anchor_id) == ('c2', 'c2') and '"b"' not in T.decode(c.prompt_ids)

def test_only_the_thought_arrived():
    k = Talk()
    a = k.say((S, U), '<think>hm</think>\nSo.', delivered=('yes', 'unknown'))
    b = k.say((S, U, Message('assistant', '', 'hm')), 'x')
    assert b.anchor_id == 'c0' and T.decode(b.prompt_ids[len(a.prompt_ids):]).startswith('<think>hm</think>\n<|im_end|>')

def test_text_cut_midway_and_merged_later():
    "Qwen Code keeps half a text, asks to go on, and joins both later: the tokens stay as far as they came, the continuation is a dead branch."
    k = Talk()
    a = k.say((S, U), 'The answer is forty-two.' + tool('ls'), delivered=('unknown', 'no'))
    half = Message('assistant', 'The answer is ')
    b = k.say((S, U, half, Message('user', 'The connection dropped. Resume.')), 'forty-three.')
    n = len(a.prompt_ids) + len('The answer is ')
    assert (b.parent_id, b.anchor_id) == ('c0', 'c0') and b.prompt_ids[:n].tolist() == [*a.prompt_ids, *a.output_ids][:n]
    merged = k.say((S, U, Message('assistant', 'The answer is forty-three.'), U), 'Fine.')
    assert merged.parent_id is None and merged.role == 'main'
    assert extends(merged, k.say((*merged.messages, merged.response, U), 'x'))
    for text in ('The answer was', 'The answer is forty-two. More.'): assert k.lin.match((S, U, Message('assistant', text), U), SH).parent is None
    full = Talk(); full.say((S, U), 'The answer is 42.')
    full.lin.set_delivered('c0', ('yes',))                       # written whole into a socket whose other end was gone: what was delivered is an upper bound
    assert full.lin.match((S, U, half, U), SH).parent_id == 'c0'
    other = Talk(); other.say((S, U), 'The answer is 42.', delivered=('no',))
    assert other.lin.match((S, U, half, U), SH).parent is None

def test_cut_needs_no_special_tokens():
    "A tokenizer without `<tool_call>` as a token of its own: the kept tokens are found all the same."
    class Plain(Bytes): special = {k: v for k, v in Bytes.special.items() if 'im_' in k}
    k = Talk(Template(Plain()))
    a = k.say((S, U), 'Look.\n' + tool('ls'), delivered=('yes', 'no'))
    b = k.say((S, U, Message('assistant', 'Look.'), U), 'x')
    assert b.anchor_id == 'c0' and k.t.decode(b.prompt_ids[len(a.prompt_ids):]).startswith('Look.\n<|im_end|>')

def test_invalid_calls_rewritten_by_the_harness_are_a_branch():
    "OpenCode: the call of an unknown tool comes back as the tool `invalid`."
    k = Talk()
    a = k.say((S, U), tool('ls')); h = (S, U, a.response, result(a, 'x'))
    b = k.say(h, tool('fly'))
    other = replace(b.response, tool_calls=(replace(b.response.tool_calls[0], name='invalid', arguments={'tool': 'sh'}, raw='{"tool":"sh"}'),))
    c = k.say((*h, other, Message('tool', 'no such tool')), 'sorry')
    assert (c.parent_id, c.anchor_id, c.role) == ('c0', 'c0', 'main') and extends(a, c) and not extends(b, c)

def test_system_message_put_into_the_past():
    "Claude Code's subagents: a role-system message appears behind the first tool result."
    k = Talk(); note = Message('system', 'Date: Monday')
    a = k.say((S, U), tool('ls')); h = (S, U, a.response, result(a, 'x'))
    b = k.say(h, tool('pwd'))
    c = k.say((*h, note, b.response, result(b, 'y')), 'done')
    assert (c.parent_id, c.anchor_id) == ('c1', 'c0') and b.output_ids.tobytes() in c.prompt_ids.tobytes()
    assert extends(c, k.say((*c.messages, c.response, U), 'x'))

def test_other_pictures_are_another_history():
    k = Talk(); see = lambda sha: Message('user', '[image]', media=(sha,))
    a = k.say((S, see('aa')), 'A cat.')
    assert extends(a, k.say((S, see('aa'), a.response, U), 'x'))
    m = k.lin.match((S, see('bb'), a.response, U), SH)
    assert (m.parent_id, m.anchor_id) == (None, None)

def test_compaction_after_one_turn_is_a_new_root():
    k = Talk(); a = k.say((S, U), tool('ls'))
    s = k.say((S, replace(U, content=U.content + '\nYour task is to create a detailed summary of the conversation so far.')), 'Summary: x')
    r = k.say((S, Message('user', 'This session is being continued.'), a.response, result(a, 'y')), 'done')
    assert (s.role, s.parent_id, r.role, r.parent_id, r.anchor_id) == ('compaction', None, 'main', None, None)
    assert a.output_ids.tobytes() in r.prompt_ids.tobytes()

def test_spacing_is_no_drift_where_the_dialect_has_no_text():
    "Anthropic carries arguments as values; a dialect that carries text can say what the harness did to it."
    k = Talk(); a = k.say((S, U), '<tool_call>{"name": "sh", "arguments": {"cmd":"ls",   "n":1}}</tool_call>')
    c = a.response.tool_calls[0]
    replay = lambda args, raw=None: replace(a.response, tool_calls=(replace(c, arguments=args, raw=raw or json.dumps(args)),))
    drift = lambda m: k.say((S, U, m, result(a, 'x')), 'y').drift
    assert drift(replay({'cmd': 'ls', 'n': 1})) == 0 and drift(replay({'n': 1, 'cmd': 'ls'})) == 1 and drift(replay({'cmd': 'ls', 'n': 1}, '{"cmd":"ls","n":1}')) == 1

def test_compaction_starts_anew():
    k = Talk()
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x')), tool('pwd'))
    ask = Message('user', 'Your task is to create a detailed summary of the conversation so far.')
    s = k.say((S, U, a.response, result(a, 'x'), ask), 'Summary: x')
    r = k.say((S, Message('user', 'This session is being continued: Summary: x'), b.response, result(b, 'y')), 'done')
    assert (s.role, s.parent_id, r.role, r.parent_id) == ('compaction', 'c0', 'main', None)
    assert r.anchor_id is None and b.output_ids.tobytes() in r.prompt_ids.tobytes()   # the turn that was kept has its own ids

def test_P7_side_calls():
    k = Talk(); title = Message('system', 'Generate a title.')
    assert k.say((title, U), 'Title', ()).role == 'side'     # before anything else is known
    assert Talk().say((Message('system', 'Name it.'), U), 'Title', ()).role == 'main'
    a = k.say((S, U), tool('ls'))
    b = k.say((S, U, a.response, result(a, 'x')), tool('pwd')); h = (*b.messages, b.response, result(b, 'y'))
    k.say((Message('user', 'quota'),), 'q', (), requested=dict(max_tokens=1))
    k.say((title, Message('user', 'again')), 'Title', ())
    c = k.say(h, 'done')
    k.say((*h, c.response, Message('user', 'What did you do?')), 'I listed.', ())   # a real turn without tools
    roles = {i: r for i, (r, _) in k.lin.roles().items()}
    assert [roles[f'c{i}'] for i in range(7)] == ['side', 'main', 'main', 'side', 'side', 'main', 'main']
    assert all(why for _, why in k.lin.roles().values())

SYS = {h: f'You are {h}. ' + 'x'*200 for h in ('claude', 'codex', 'opencode', 'openclaw', 'hermes', 'qwen')}
def ask(system, *said, tools=(), **kw): return dict(messages=tuple(filter(None, [system and Message('system', system), *(m if isinstance(m, Message) else Message('user', m) for m in said)])), tools=tuple(dict(name=t, description='', parameters={}) for t in tools), **kw)
def more(n, *said, tools=None, **kw): return dict(after=n, said=said, tools=tools and tuple(dict(name=t, description='', parameters={}) for t in tools), **kw)
CLAUDE, CODEX = ('Agent', 'Bash', 'Edit'), ('shell', 'spawn_agent', 'plan')
AGENT, SPAWN = {'X-Claude-Code-Agent-Id': 'a1'}, {'x-openai-subagent': 'collab_spawn', 'x-codex-parent-thread-id': 't1'}
KIND = lambda k: {'x-codex-turn-metadata': json.dumps(dict(turn_id='1', request_kind=k))}
# per harness: the calls as they come, each with the role it has in the end; `more(n)` goes on after call n
ROLES = {
 'claude: quota, title by the small model, two turns, a turn without tools': [
    (ask(None, 'quota', max_tokens=1, model='haiku'), 'side'), (ask('Summarize this coding conversation in under 50 characters.', 'Go.', model='haiku'), 'side'),
    (ask(SYS['claude'], 'Go.', tools=CLAUDE), 'main'), (more(2, 'x'), 'main'), (more(3, 'What did you do?', tools=()), 'main'),
    (more(4, 'And again, by another model?', tools=(), model='fallback'), 'main')],
 'claude: twin subagents by header, and their compaction': [
    (ask(SYS['claude'], 'Go.', tools=CLAUDE), 'main'), *[(ask('You search.', 'Find.', tools=CLAUDE[1:], headers=AGENT), 'subagent')]*2, (more(1, 'x', headers=AGENT), 'subagent'),
    (more(3, 'Your task is to create a detailed summary of the conversation so far', headers=AGENT), 'compaction'), (more(0, 'x'), 'main')],
 'claude: a fork of the main agent': [
    (ask(SYS['claude'], 'Go.', tools=CLAUDE), 'main'), (more(0, 'Fork started: that fork is you.', headers=AGENT), 'subagent'), (more(0, 'x'), 'main')],
 'claude: subagent known by the billing line': [
    (ask(SYS['claude'], 'Go.', tools=CLAUDE, headers={'x-anthropic-billing-header': 'cc_version=2;'}), 'main'),
    (ask(SYS['claude'], 'Find.', tools=CLAUDE, headers={'x-anthropic-billing-header': 'cc_version=2; cc_is_subagent=true;'}), 'subagent')],
 'claude: compaction, then a new root': [
    (ask(SYS['claude'], 'Go.', tools=CLAUDE), 'main'), (more(0, 'x'), 'main'), (more(0, 'CRITICAL: text only. Your task is to create a detailed summary of the conversation so far.'), 'compaction'),
    (ask(SYS['claude'], 'This session is being continued from a previous conversation.', tools=CLAUDE), 'main'), (more(3, 'x'), 'main')],
 'claude: resumed on another day': [(ask(SYS['claude'] + 'Sunday', 'Go.', tools=CLAUDE), 'main'), (ask(SYS['claude'] + 'Monday', 'Go on.', tools=CLAUDE), 'main')],
 'codex: subagents, compaction by header, new root': [
    (ask(SYS['codex'], 'env', 'Go.', tools=CODEX, headers=KIND('turn')), 'main'), (ask(SYS['codex'], 'env', 'Find.', tools=CODEX[:1], headers=SPAWN), 'subagent'), (more(1, 'x', headers=SPAWN), 'subagent'),
    (more(0, 'x', tools=(), headers=KIND('compaction')), 'compaction'), (ask(SYS['codex'], 'env', 'Go.', 'Another model summarised: x', tools=CODEX, headers=KIND('turn')), 'main')],
 'codex: compaction without its header': [
    (ask(SYS['codex'], 'env', 'Go.', tools=CODEX), 'main'), (more(0, 'You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.', tools=()), 'compaction')],
 'opencode: title first, subagents by header, flattened compaction': [
    (ask('You are a title generator. You output ONLY a thread title.', 'Generate a title for this conversation:', 'Go.'), 'side'), (ask(SYS['opencode'], 'Go.', tools=CODEX), 'main'),
    *[(ask('You research.', 'Find.', tools=CODEX[:2], headers={'x-parent-session-id': 's'}), 'subagent')]*2, (more(1, 'x'), 'main'),
    (ask('You are a helpful AI assistant tasked with summarizing conversations.', 'user: Go.'), 'compaction'), (ask(SYS['opencode'], 'What did we do so far?', 'x', tools=CODEX), 'main')],
 'openclaw: flattened compaction with its own system prompt': [
    (ask(SYS['openclaw'], 'Go.', tools=CODEX), 'main'), (ask('You are a context summarization assistant.', '<conversation> the title page </conversation>'), 'compaction'),
    (ask(SYS['openclaw'], 'The history was compacted into the following summary: x', 'Continue the current task.', tools=CODEX), 'main')],
 'hermes: compaction without any system prompt': [
    (ask(SYS['hermes'], 'Go.', tools=CODEX), 'main'), (ask(None, 'Create a structured handoff summary for a later assistant. TURNS TO SUMMARIZE: x'), 'compaction'), (ask(SYS['hermes'], 'Go.', 'x', tools=CODEX), 'main')],
 'qwen: subagents without any header, two compaction calls': [
    (ask(SYS['qwen'], 'Go.', tools=CODEX), 'main'), (ask('You research.', 'Find a.', tools=CLAUDE), 'subagent'), (ask('You research.', 'Find b.', tools=CLAUDE), 'subagent'), (more(1, 'x'), 'subagent'), (more(2, 'x'), 'subagent'),
    (more(0, 'First, reason in your scratchpad. Then, generate the <state_snapshot>.'), 'compaction'), (ask('You are the component that summarizes internal chat history.', 'x'), 'compaction'),
    (ask(SYS['qwen'], '<summary>x</summary>', tools=CODEX), 'main')],
 'a task that talks about summaries and titles': [
    (ask(SYS['claude'], 'Your task is to create a detailed summary of the conversation in chat.txt, with a title.', tools=CLAUDE), 'main'),
    (ask(SYS['claude'], 'Your task is to create a detailed summary of the conversation in chat.txt, with a title.', tools=CLAUDE), 'main'),   # its retry
    (more(1, 'Now a summary of this conversation, please.', tools=()), 'main'), (more(1, Message('tool', 'CONTEXT CHECKPOINT COMPACTION')), 'main')],
 'a real user turn without tools on the main model': [(ask(SYS['claude'], 'Go.', tools=CLAUDE), 'main'), (ask(SYS['claude'], 'What is 2 + 2?'), 'main')],
 'no system prompts, no tools': [(ask(None, 'Go.'), 'main'), (more(0, 'x'), 'main'), (ask(None, 'q', max_tokens=1), 'side')],
}

@pytest.mark.parametrize('name', ROLES)
def test_P7_roles_by_what_the_wire_shows(name):
    k, told = Talk(), []
    for i, (q, want) in enumerate(ROLES[name]):
        if 'after' in q:
            c = k.calls[f'c{q["after"]}']
            q = dict(messages=(*c.messages, c.response, *(m if isinstance(m, Message) else Message('user', m) for m in q['said'])), tools=c.tools if q['tools'] is None else q['tools'], **{x: v for x, v in q.items() if x not in ('after', 'said', 'tools')})
        c = k.say(q['messages'], f'reply {i}', q['tools'], headers=q.get('headers', {}), model=q.get('model', 'big'), requested=dict(max_tokens=q.get('max_tokens', 32000)))
        told.append(c.role)
    assert [r for r, _ in k.lin.roles().values()] == [r for _, r in ROLES[name]], list(k.lin.roles().values())
    assert told == [r for _, r in ROLES[name]] and all(why for _, why in k.lin.roles().values())   # and not only in the end

def test_P7_a_compaction_in_unknown_words_is_known_by_what_becomes_of_it():
    k = Talk(); said = 'The user wants three files listed; two of them have been read and hold the numbers 4 and 5.'
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x'), Message('user', 'Fasse alles zusammen.')), f'<summary>\n{said}\n</summary>')
    c = k.say((S, Message('user', f'Weiter geht es:\n{said}')), 'ok')
    assert b.role == 'main' and [r for r, _ in k.lin.roles().values()] == ['main', 'compaction', 'main'] and c.parent_id is None

def test_a_tool_result_about_summaries_is_no_compaction():
    k = Talk(); a = k.say((S, U), tool('cat notes'))
    assert k.say((S, U, a.response, result(a, 'Your task is to create a detailed summary of the conversation; compaction')), 'y').role == 'main'

def test_quarantined_calls_lend_nothing():
    k = Talk(); k.say((S, U), 'x', quarantine='curl')
    m = k.lin.match((S, U, Message('assistant', 'x'), U), SH)
    assert m.parent is None and m.anchor is None and 'c0' not in k.lin.roles()

def test_rebuilt_from_its_calls_it_matches_the_same(tmp_path):
    k = Talk(); h = (S, U)
    for i in range(5):
        c = k.say(h, tool(f'{i}') if i % 2 else f'<think>{i}</think>\nsay {i}'); h = (*h, c.response, result(c, 'r') if i % 2 else U)
    again = Lineage(T)
    for c in k.calls.values(): again.add(c)
    a, b = k.lin.match(h, SH), again.match(h, SH)
    assert (a.parent_id, a.anchor_id, a.since) == (b.parent_id, b.anchor_id, b.since) == ('c4', 'c4', len(h) - 1)
    np.testing.assert_array_equal(k.lin.prompt(h, SH, a)[0], again.prompt(h, SH, b)[0])

def test_P48_only_new_text_is_encoded():
    "O(new tokens): the tokenizer never sees the history again."
    class Counting(Bytes):
        seen = 0
        def encode(self, text): Counting.seen += len(text); return super().encode(text)
    k = Talk(Template(Counting())); h = (Message('system', 's'*50_000), U)
    first = k.say(h, tool('ls'))
    per = []
    for i in range(20):
        h = (*h, list(k.calls.values())[-1].response, Message('tool', 'x'*100))
        Counting.seen = 0; k.say(h, tool(f'{i}')); per.append(Counting.seen)
    assert max(per) < 1000

@pytest.mark.parametrize('same', [True, False])
def test_P48_nothing_old_is_hashed_again(monkeypatch, same):
    "Whether the proxy hands over the same objects or equal ones: a request costs what is new in it."
    seen, real = [], lineage.message_key
    monkeypatch.setattr(lineage, 'message_key', lambda m: seen.append(m) or real(m))
    k = Talk(); h = (Message('system', 's'*30_000), U); first = []
    for i in range(60):
        seen.clear()
        c = k.say(h if same else tuple(replace(m, content=m.content[:1] + m.content[1:]) for m in h), tool(f'{i}'))
        assert len(seen) <= 4 and all(a is b for a, b in zip(k.match.messages, first))   # the objects of the last request are used again
        first, h = k.match.messages, (*h, c.response, result(c, 'x'*500))
        assert k.match.tools is k.calls['c0'].tools or i == 0 or k.match.tools == SH
    assert build_tree(list(k.calls.values())).stats['token_leaves'] == 1

def test_memory_is_linear():
    "The prompt of a call is the beginning of its successor's: one buffer a branch."
    k = Talk(); h = (S, U)
    calls = []
    for i in range(10): calls.append(c := k.say(h, f'a{i}')); h = (*h, c.response, U)
    nodes = list(k.lin.nodes.values())
    for n, c in zip(nodes, calls, strict=True): np.testing.assert_array_equal(n.prompt, c.prompt_ids)
    assert [n.own is None for n in nodes] == [True]*(len(nodes) - 1) + [False], "one prompt is kept, the others are its beginnings"

def test_random_sessions_never_lose_a_token():
    "Whatever forks, retries and interleavings: the prompt always starts with prompt + output of its anchor, and decodes to the request."
    for seed in range(30):
        rng, k, open_ = random.Random(seed), Talk(), [((S, U), SH), ((Message('system', 'B'), U), GREP)]
        for i in range(25):
            h, tools = rng.choice(open_)
            c = k.say(h, rng.choice(['ok', tool(str(i)), '<think>t</think>\nyes', '']), tools, eos=rng.random() < .9,
                      delivered=rng.choice([('yes',), ('no',), ('unknown',)]))
            if c.anchor_id and k.match.cut is None: assert extends(k.calls[c.anchor_id], c)
            r = c.response
            nxt = tuple(Message('tool', f'r{i}', tool_call_id=t.id) for t in r.tool_calls) or (Message('user', f'u{i}'),)
            open_.append(((*h, replace(r, reasoning=rng.choice([None, r.reasoning])), *nxt), tools))
        for c in k.calls.values():
            want = [i for i, d in k.calls.items() if d.seq < c.seq and d.response and len(c.messages) > len(d.messages) and d.tools == c.tools and
                    list(map(message_key, c.messages[:len(d.messages) + 1])) == list(map(message_key, (*d.messages, d.response)))]
            assert bool(want) == bool(c.parent_id)
            if want: assert len(k.calls[c.parent_id].messages) == max(len(k.calls[i].messages) for i in want)

# ---------------------------------------------------------------- random agents, through the dialects

WORDS = st.text('ab é\n<>{}"\\|', max_size=12)
VALUES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from([0.5, 2.0, 1e21, 12345678901234567890]), WORDS), lambda v: st.one_of(st.lists(v, max_size=2), st.dictionaries(WORDS, v, max_size=2)), max_leaves=4)

@st.composite
def raw_reply(draw):
    "Model output: thoughts, texts and calls, the JSON in any spelling."
    out = draw(st.sampled_from(['', '<think>hm</think>', '<think> \n</think>\n', '<think>a\nb</think>\n'])) + draw(st.sampled_from(['', 'So.', ' So \n', 'a\n\nb', '\n']))
    for _ in range(draw(st.integers(0, 2))):
        gap, ascii_ = draw(st.sampled_from([(', ', ': '), (',', ':'), ('  ,', ' :  ')])), draw(st.booleans())
        args = json.dumps(draw(st.dictionaries(WORDS, VALUES, max_size=3)), separators=gap, ensure_ascii=ascii_)
        out += f'<tool_call>{{"name": "sh", "arguments": {args}}}</tool_call>' + draw(st.sampled_from(['', '\n', ' then ']))
    return out

@st.composite
def habit(draw):
    "What a harness does to all it replays."
    return dict(draw(st.fixed_dictionaries(dict(keys=st.sampled_from(['as sent', 'sorted', 'reversed']), floats=st.booleans(), compact=st.booleans(), trim=st.booleans(), think=st.booleans(), ids=st.booleans()))))

def number(v, floats):
    if isinstance(v, dict): return {k: number(x, floats) for k, x in v.items()}
    if isinstance(v, list): return [number(x, floats) for x in v]
    if isinstance(v, float) and v.is_integer(): return int(v)
    return float(v) if floats and type(v) is int else v

def rewritten(args, h):
    items = sorted(args.items()) if h['keys'] == 'sorted' else list(args.items())[::-1] if h['keys'] == 'reversed' else args.items()
    return number(dict(items), h['floats'])
def dumped(args, h): return json.dumps(rewritten(args, h), **(dict(separators=(',', ':'), ensure_ascii=False) if h['compact'] else {}))
def an_id(x, h): return x.replace('_', '') if h['ids'] else x

class AnthropicWire:
    d = anthropic
    def turn(self, body, h):
        out, use, trim = [], [], h['trim'] and sum(b['type'] == 'text' for b in body['content']) == 1
        for b in body['content']:
            if b['type'] == 'thinking' and not h['think']: continue
            if b['type'] == 'text': b = {**b, 'text': b['text'].strip() if trim else b['text']}
            if b['type'] == 'tool_use': b = {**b, 'id': an_id(b['id'], h), 'input': rewritten(b['input'], h)}; use.append(b['id'])
            out.append(b)
        return [dict(role='assistant', content=out)], use
    def results(self, ids, text): return [dict(role='user', content=[dict(type='tool_result', tool_use_id=i, content=text) for i in ids])]
    def body(self, msgs): return dict(model='m', max_tokens=9, system='You act.', messages=msgs, tools=[dict(name='sh', input_schema={})])

class ChatWire:
    d = chat
    def turn(self, body, h):
        m = body['choices'][0]['message']
        calls = [dict(c, id=an_id(c['id'], h), function=dict(c['function'], arguments=dumped(json.loads(c['function']['arguments']), h))) for c in m.get('tool_calls', ())]
        text = m['content'] and (m['content'].strip() or None if h['trim'] else m['content'])
        return [dict(role='assistant', content=text, **({'tool_calls': calls} if calls else {}), **({'reasoning_content': m['reasoning_content'].strip()} if h['think'] and m.get('reasoning_content') else {}))], [c['id'] for c in calls]
    def results(self, ids, text): return [dict(role='tool', tool_call_id=i, content=text) for i in ids]
    def body(self, msgs): return dict(model='m', messages=[dict(role='system', content='You act.'), *msgs], tools=[dict(type='function', function=dict(name='sh'))])

class ResponsesWire:
    d = responses
    def turn(self, body, h):
        out, use = [], []
        for it in body['output']:
            if it['type'] == 'reasoning' and not h['think']: continue
            if it['type'] == 'function_call': it = {**it, 'call_id': an_id(it['call_id'], h), 'arguments': dumped(json.loads(it['arguments']), h)}; use.append(it['call_id'])
            out.append({k: v for k, v in it.items() if k != 'id' or not h['ids']})
        return out, use
    def results(self, ids, text): return [dict(type='function_call_output', call_id=i, output=text) for i in ids]
    def body(self, msgs): return dict(model='m', input=[dict(role='developer', content='You act.'), *msgs], tools=[dict(type='function', name='sh', parameters={})])

def user_turn(text): return [dict(role='user', content=text)]

@pytest.mark.parametrize('wire', [AnthropicWire, ChatWire, ResponsesWire])
@settings(max_examples=60, deadline=None)
@given(replies=st.lists(raw_reply(), min_size=1, max_size=5), h=habit())
def test_a_random_agent_is_one_chain(wire, replies, h):
    "Whatever a policy says, and however its harness writes it back: one chain, no fork, every sampled token in its place."
    k, w, msgs, prev = Talk(), wire(), user_turn('Go.'), None
    for i, raw in enumerate([*replies, 'end']):
        req = w.d.parse_request(w.body(msgs))
        c = k.say(req.messages, raw, req.tools)
        if prev: assert (c.parent_id, c.anchor_id) == (prev.call_id,)*2 and extends(prev, c) and not k.match.ambiguous
        body = w.d.body(req, T.parse(c.output_ids), c.call_id, 'stop', (1, 1))
        turn, ids = w.turn(json.loads(json.dumps(body)), h)
        msgs, prev = [*msgs, *turn, *(w.results(ids, f'r{i}') if ids else user_turn(f'u{i}'))], c
    t = build_tree(list(k.calls.values()))
    assert t.stats['token_leaves'] == t.stats['lineage_leaves'] == t.stats['roots'] == 1 and t.stats['trained'] == sum(len(c.output_ids) for c in k.calls.values())

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_interleaving_gives_the_tree_it_came_from(data):
    "Main agent and subagents, turn by turn in any order, with retries, forks and parallel twins: every call has the parent it was made from."
    pick = lambda xs: data.draw(st.sampled_from(xs))
    k, want, state = Talk(), {}, {}          # want: call -> parent; state: call -> (request, tools)
    starts = [((Message('system', f'You are {a}.'), Message('user', a)), tools) for a, tools in (('main', SH), ('sub', GREP), ('twin', GREP))]
    def one(h, tools, parent, delivered, again=False):
        i = len(want)
        c = k.say(h, pick([*['ok']*(not again), f'reply {i}', tool('same'), tool(str(i)), f'<think>{i}</think>\nyes' + tool('same')]), tools, delivered=(delivered,)*3)
        want[c.call_id], state[c.call_id] = parent, (h, tools)
        return c
    open_ = [one(*s, None, 'yes') for s in starts]
    for i in range(data.draw(st.integers(1, 14))):
        c = pick(open_); h, tools = state[c.call_id]
        kind = pick(['go on', 'go on', 'go on', 'retry', 'fork'])
        if kind == 'retry':                  # the same request again: its reply is the one that goes on, and its text or its ids tell it from the first
            k.lin.set_delivered(c.call_id, ('no',)*3)
            open_.append(one(h, tools, want[c.call_id], 'yes', again=True)); open_.remove(c)
        else:
            nxt = tuple(Message('tool', f'r{i}', tool_call_id=t.id) for t in c.response.tool_calls) or (Message('user', f'u{i}'),)
            r = replace(c.response, reasoning=pick([None, c.response.reasoning]), content=pick([c.response.content, f' {c.response.content}\n']))
            d = one((*h, r, *nxt), tools, c.call_id, 'yes')
            if kind == 'go on': open_.remove(c)
            open_.append(d)
    assert {i: c.parent_id for i, c in k.calls.items()} == want and all(c.anchor_id == c.parent_id for c in k.calls.values())
    for i, p in want.items():
        if p: assert extends(k.calls[p], k.calls[i])
    again = Lineage(T)
    for c in k.calls.values(): again.add(replace(c, delivered=k.lin.nodes[c.call_id].delivered))
    for c in k.calls.values():
        m = again.match(c.messages, c.tools)
        assert m.parent_id == c.parent_id or want[c.call_id] is not None   # rebuilt from the record; a later twin may have the same words
    t = build_tree([replace(c, delivered=k.lin.nodes[c.call_id].delivered) for c in k.calls.values()], train_roles=('main', 'subagent'))
    fate = dict(zip((c.call_id for c in t.calls), t.fate_C)); used = {p for i, p in want.items() if fate[i] == 'accepted'}
    assert {t.calls[i].call_id for i in t.lineage_leaves} == {i for i in want if fate[i] == 'accepted' and i not in used}
    for c, (p, o) in zip(t.calls, t.expand()): assert p.tobytes() == c.prompt_ids.tobytes() and o.tobytes() == c.output_ids.tobytes()
