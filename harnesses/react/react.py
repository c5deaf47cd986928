"""clawlab's own ReACT loop: one model, one shell tool, nothing else.

    CLAWLAB_API_KEY=... react.py --base-url http://127.0.0.1:8000/v1 --model NAME [--turns 8] [--seconds 30] [--stream] [--forks] TASK

Speaks OpenAI Chat Completions with the standard library only. Exit codes: 0 the model finished with a text,
2 usage, 3 turn limit, 4 the endpoint failed or refused, 5 the last reply was cut off at its length limit.
"""
import argparse, http.client, json, os, signal, subprocess, sys, time
from urllib.parse import urlsplit

SYSTEM = ('You solve a task in a Linux shell. Use the bash tool, one command per call; the folder stays the same. '
          'When the task is done, answer with a short text and no tool call.')
TOOLS = [{'type': 'function', 'function': {'name': 'bash', 'description': 'Run a shell command. Returns its output.', 'parameters': {
    'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']}}}]
KEEP = 4000  # characters of a command's output that the model sees


def post(base_url, key, body, tries=3):
    "One call, tried again where that can help; the response is open."
    url = urlsplit(base_url)
    headers = {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}', 'User-Agent': 'clawlab-react/1'}
    for k in range(tries):
        try:
            conn = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
            conn.request('POST', url.path.rstrip('/') + '/chat/completions', json.dumps(body), headers)
            r = conn.getresponse()
            if r.status == 200: return reply_of(r, body.get('stream'))
            why = f'{r.status}: {r.read(2000).decode(errors="replace")}'
            if r.status not in (408, 429) and r.status < 500: break
        except (OSError, http.client.HTTPException, EOFError) as e: why = f'{type(e).__name__}: {e}'
        if k + 1 < tries: time.sleep(0.5 * 2**k)
    print(f'react: {why}', file=sys.stderr)
    sys.exit(4)


def reply_of(r, stream):
    "`(assistant message, finish reason)` of a response; half a stream is an error, never half a turn."
    if not stream:
        choice = json.loads(r.read())['choices'][0]
        return choice['message'], choice['finish_reason']
    msg, calls, finish = {'role': 'assistant', 'content': ''}, {}, None
    for line in r:
        data = line.decode().strip().removeprefix('data:').strip() if line.startswith(b'data:') else ''
        if data == '[DONE]': break
        for choice in json.loads(data).get('choices', ()) if data else ():
            finish, delta = choice.get('finish_reason') or finish, choice.get('delta', {})
            for k in ('content', 'reasoning_content'):
                if delta.get(k): msg[k] = msg.get(k, '') + delta[k]
            for d in delta.get('tool_calls') or ():
                c = calls.setdefault(d['index'], {'id': '', 'type': 'function', 'function': {'name': '', 'arguments': ''}})
                c['id'] = d.get('id') or c['id']
                for k, v in d.get('function', {}).items(): c['function'][k] += v or ''
    if not finish: raise EOFError('the stream ended early')
    return msg | ({'tool_calls': [calls[i] for i in sorted(calls)]} if calls else {}), finish


def run(call, seconds):
    "The output of one tool call, as the model is to see it."
    try:
        if call['function']['name'] != 'bash': return f'error: unknown tool {call["function"]["name"]}'
        command = json.loads(call['function']['arguments'])['command']
        if not isinstance(command, str) or '\0' in command: raise TypeError
    except (ValueError, KeyError, TypeError): return 'error: bash takes {"command": "..."}'
    p = subprocess.Popen(['/bin/bash', '-c', command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try: out, note = p.communicate(timeout=seconds)[0], f'exit code {p.returncode}' if p.returncode else ''
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, note = p.communicate()[0], f'timed out after {seconds:g} s'
    text = out.decode(errors='replace').rstrip('\n')
    if len(text) > KEEP: text = f'{text[:KEEP//2]}\n[{len(text)-KEEP} characters left out]\n{text[-KEEP//2:]}'
    return '\n'.join(x for x in (text, note) if x) or '(no output)'


def told(messages, left):
    "What `--forks` sends instead of the history: as other harnesses do, it drops thinking and older outputs, and its last word is a reminder that isn't kept."
    last = max((i for i, m in enumerate(messages) if m['role'] == 'assistant'), default=0)
    out = [m | ({'content': '[left out]'} if m['role'] == 'tool' and i < last else {}) for i, m in enumerate(messages)]
    for m in out: m.pop('reasoning_content', None)
    return [*out, {'role': 'user', 'content': f'({left} more calls)'}]


def main():
    p = argparse.ArgumentParser(prog='react')
    p.add_argument('--base-url', required=True); p.add_argument('--model', required=True)
    p.add_argument('--turns', type=int, default=8); p.add_argument('--seconds', type=float, default=30); p.add_argument('--stream', action='store_true')
    p.add_argument('--forks', action='store_true')
    p.add_argument('task')
    a = p.parse_args()
    key = os.environ.pop('CLAWLAB_API_KEY', '')  # the commands need not see it
    messages = [{'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': a.task}]
    for k in range(a.turns):
        msg, finish = post(a.base_url, key, {'model': a.model, 'messages': told(messages, a.turns - k) if a.forks else messages, 'tools': TOOLS} | ({'stream': True} if a.stream else {}))
        messages.append(msg)
        if not msg.get('tool_calls'):
            print(msg.get('content') or '')
            sys.exit(5 if finish == 'length' else 0)
        messages += [{'role': 'tool', 'tool_call_id': c['id'], 'content': run(c, a.seconds)} for c in msg['tool_calls']]
    print('react: turn limit', file=sys.stderr)
    sys.exit(3)


if __name__ == '__main__': main()
