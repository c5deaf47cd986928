#!/usr/bin/python3
"""The screen of this container for a model: an MCP server on stdin and stdout (JSON-RPC, one message a line), standard library only.
The display starts with the first server and stays until the container ends, so a second server (a restarted harness, a grader) sees the same screen.

    screen.py             the server
    screen.py PROGRAM...  start the display, then become this program, which has DISPLAY set: a harness that starts servers of its own.
                          Without a display it doesn't start, where it would only go on without those tools."""
import base64, fcntl, json, os, re, shutil, socket, struct, subprocess, sys, zlib

DISPLAY, BUFFER = os.environ.setdefault('DISPLAY', ':99'), '/tmp/screen'   # set for our children: a sandbox has an environment of its own
WIDTH, HEIGHT = map(int, os.environ.get('SCREEN_SIZE', '1280x800').split('x'))
VERSIONS = ('2025-06-18', '2025-03-26', '2024-11-05')
QUIET = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


class Refused(Exception): "What the model asked for can't be done; it is told why."

def running():
    "Does somebody listen on the display?"
    with socket.socket(socket.AF_UNIX) as s: return s.connect_ex(f'/tmp/.X11-unix/X{DISPLAY[1:]}') == 0

def start():
    "X, whose frame buffer is a file that we read, and a window manager; once per container."
    if missing := [p for p in ('Xvfb', 'openbox', 'xdotool', 'chromium') if not shutil.which(p)]: sys.exit(f'screen: {", ".join(missing)} missing: use the image, or install the Debian packages')
    os.makedirs(BUFFER, exist_ok=True)
    with open(f'{BUFFER}/lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        if running(): return
        r, w = os.pipe()
        subprocess.Popen(['Xvfb', DISPLAY, '-screen', '0', f'{WIDTH}x{HEIGHT}x24', '-fbdir', BUFFER, '-nolisten', 'tcp', '-noreset', '-displayfd', str(w)], pass_fds=[w], **QUIET)
        os.close(w)
        with open(r) as ready:                                          # to its end: a server whose reader has gone dies of it
            if not ready.read().strip(): sys.exit('screen: Xvfb did not start')
        subprocess.Popen(['openbox'], **QUIET)

def xdotool(*args, timeout=30):
    "Its output; real input events through XTEST."
    try: p = subprocess.run(['xdotool', *map(str, args)], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired: raise Refused(f'xdotool {args[0]} took longer than {timeout} s') from None
    if p.returncode or p.stderr: raise Refused(p.stderr.strip() or f'xdotool {args[0]} failed')   # a key that it doesn't know is a remark only
    return p.stdout

def png():
    "The frame buffer (an XWD file: header, colour map, rows of BGRX) as a PNG."
    with open(f'{BUFFER}/Xvfb_screen0', 'rb') as f: d = f.read()
    h = struct.unpack('>25I', d[:100]); w, height, row, at = h[4], h[5], h[12], h[0] + 12 * h[19]
    rows = bytearray()
    for y in range(height):
        p = d[at + y*row:at + y*row + 4*w]; line = bytearray(3 * w)
        line[0::3], line[1::3], line[2::3] = p[2::4], p[1::4], p[0::4]
        rows += b'\0' + line
    def chunk(kind, data): return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', w, height, 8, 2, 0, 0, 0)) + chunk(b'IDAT', zlib.compress(bytes(rows), 3)) + chunk(b'IEND', b'')


def at(x, y):
    if not (0 <= x < WIDTH and 0 <= y < HEIGHT): raise Refused(f'({x}, {y}) is outside the screen of {WIDTH} x {HEIGHT}')
    return ('mousemove', x, y)

def said(s): return {'type': 'text', 'text': s}

def screenshot(): return {'type': 'image', 'mimeType': 'image/png', 'data': base64.b64encode(png()).decode()}
def click(x, y, button='left', count=1):
    xdotool(*at(x, y), 'click', '--repeat', count, '--delay', 80, {'left': 1, 'middle': 2, 'right': 3}[button]); return said(f'clicked at ({x}, {y})')
def move(x, y): xdotool(*at(x, y)); return said(f'pointer at ({x}, {y})')
def type_(text):
    "Only what is on the keyboard: xdotool puts other characters on a spare key for a moment, and Chromium then loses some."
    if bad := re.findall(r'[^\x20-\x7e\n\t]', text): raise Refused(f'the keyboard of this screen has no {bad[0]!r}: ASCII only')
    xdotool('type', '--delay', 20, '--', text, timeout=30 + len(text) / 10); return said(f'typed {len(text)} characters')
def key(keys): xdotool('key', '--', *keys.split()); return said(f'pressed {keys}')
def scroll(x, y, direction='down', amount=3):
    xdotool(*at(x, y), 'click', '--repeat', amount, '--delay', 20, {'up': 4, 'down': 5, 'left': 6, 'right': 7}[direction]); return said(f'scrolled {direction}')
def windows(): return said(subprocess.run(['xdotool', 'search', '--onlyvisible', '--name', '.', 'getwindowname', '%@'], capture_output=True, text=True, timeout=30).stdout)
def open_(url):
    if url.startswith('-'): raise Refused('an address is wanted')
    subprocess.Popen(['chromium', url], **QUIET)
    xdotool('search', '--sync', '--onlyvisible', '--class', 'chromium', timeout=60); return said(f'opened {url}')

INT, STR = {'type': 'integer'}, {'type': 'string'}
def among(*names): return {'type': 'string', 'enum': list(names)}
XY = dict(x={**INT, 'description': 'pixels from the left'}, y={**INT, 'description': 'pixels from the top'})
TOOLS = {   # name: (function, description, arguments, how many of them are required)
    'screenshot': (screenshot, f'A picture of the screen, {WIDTH} x {HEIGHT} pixels.', {}, 0),
    'click': (click, 'Click with the mouse.', {**XY, 'button': among('left', 'middle', 'right'), 'count': {**INT, 'minimum': 1, 'maximum': 3}}, 2),
    'move': (move, 'Move the mouse pointer.', XY, 2),
    'type': (type_, 'Type text on the keyboard.', {'text': STR}, 1),
    'key': (key, 'Press keys, one after the other: names as in X, joined with + ("Return", "ctrl+l", "Tab Tab space").', {'keys': STR}, 1),
    'scroll': (scroll, 'Turn the mouse wheel.', {**XY, 'direction': among('down', 'up', 'left', 'right'), 'amount': {**INT, 'minimum': 1, 'maximum': 30}}, 2),
    'open': (open_, 'Open a page in the browser: file:///workspace/... or an address.', {'url': STR}, 1),
    'windows': (windows, 'The titles of the windows, one a line.', {}, 0)}

def listed():
    return [dict(name=n, description=d, inputSchema=dict(type='object', properties=a, required=list(a)[:need], additionalProperties=False)) for n, (_, d, a, need) in TOOLS.items()]

def checked(args, schema, need):
    "The arguments, if they are what the schema says."
    kinds = {'integer': int, 'string': str}
    if not isinstance(args, dict): raise Refused('arguments must be an object')
    if bad := [a for a in args if a not in schema]: raise Refused(f'no argument {bad[0]!r}; there are {", ".join(schema) or "none"}')
    if bad := [a for a in list(schema)[:need] if a not in args]: raise Refused(f'argument {bad[0]!r} is missing')
    for a, v in args.items():
        s = schema[a]
        if type(v) is not kinds[s['type']] or v not in s.get('enum', [v]) or s['type'] == 'integer' and not s.get('minimum', v) <= v <= s.get('maximum', v): raise Refused(f'argument {a!r} is {v!r}, not {json.dumps(s)}')
    return args

def call(name, args):
    f, _, schema, need = TOOLS[name]
    try: content, error = f(**checked(args, schema, need)), False
    except (Refused, OSError) as e: content, error = said(str(e)), True
    return dict(content=[content], isError=error)

def answer(m):
    "The result of one request; KeyError: no such method; ValueError: bad parameters."
    p = m.get('params') or {}
    match m['method']:
        case 'initialize': v = p.get('protocolVersion'); return dict(protocolVersion=v if v in VERSIONS else VERSIONS[0], capabilities={'tools': {}}, serverInfo=dict(name='screen', version='1'))
        case 'ping': return {}
        case 'tools/list': return dict(tools=listed())
        case 'tools/call':
            if p.get('name') not in TOOLS: raise ValueError(f'unknown tool {p.get("name")!r}')
            return call(p['name'], p.get('arguments') or {})
    raise KeyError(m['method'])

def main():
    start()
    if program := sys.argv[1:]: os.execvp(program[0], program)
    for line in sys.stdin.buffer:
        if not line.strip(): continue
        out = {'jsonrpc': '2.0', 'id': None}
        try:
            m = json.loads(line)
            if not isinstance(m, dict) or not isinstance(m.get('method'), str): out['error'] = dict(code=-32600, message='not a request')
            elif 'id' not in m: continue                      # a notification
            else: out |= dict(id=m['id'], result=answer(m))
        except KeyError as e: out |= dict(id=m['id'], error=dict(code=-32601, message=f'no method {e}'))
        except ValueError as e:
            bad = isinstance(e, (json.JSONDecodeError, UnicodeDecodeError))
            out |= dict(id=None if bad else m['id'], error=dict(code=-32700 if bad else -32602, message=str(e)))
        sys.stdout.write(json.dumps(out) + '\n'); sys.stdout.flush()

if __name__ == '__main__': main()
