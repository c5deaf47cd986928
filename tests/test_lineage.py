"""What a request continues, whatever a harness does to its history (faults P, items by number)."""
import json, random
from dataclasses import replace
import numpy as np
import pytest
from clawlab.capture.chat import Bytes, Template
from clawlab.capture.dialects import anthropic, chat
from clawlab.capture.dialects.base import tool_id
from clawlab.capture.lineage import Lineage, message_key
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

@pytest.mark.parametrize('header,role', [({'x-claude-code-agent-id': 'a'}, 'subagent'), ({'x-parent-session-id': 'a'}, 'subagent'), ({'X-Openai-Subagent': 'collab_spawn'}, 'subagent')])
def test_subagents_by_header(header, role):
    k = Talk(); k.say((S, U), 'x')
    assert k.say((S, Message('user', 'other')), 'y', headers=header).role == role

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

def test_only_new_text_is_encoded():
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

def test_memory_is_linear():
    "The prompt of a call becomes a view into its successor's: one buffer a branch."
    k = Talk(); h = (S, U)
    for i in range(10): c = k.say(h, f'a{i}'); h = (*h, c.response, U)
    nodes = list(k.lin.nodes.values())
    assert all(n.prompt.base is not None for n in nodes[:-1])

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
