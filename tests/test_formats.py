"Tasks in other people's layouts: every rule of each, on miniatures; round trips; broken data; what the agent left behind must not win."
import asyncio, json, os, random, shutil
from dataclasses import replace
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st
import formats
from clawlab.records import InputError, Task
from clawlab.launch import grading
from clawlab.launch.formats import base
from clawlab.launch.formats.base import RUBRIC_ONLY, rubric_of, to_workspace, outside, write_files
from clawlab.launch.formats.convert import FORMATS, convert, detect, left_out, load_any
from clawlab.launch.formats.harbor import environment
from clawlab.launch.grading import check, grade, play
from clawlab.launch.sandbox.base import probe
from clawlab.launch.tasks import load_suite, save_suite, select
from clawlab.cli import main

NO_BWRAP = asyncio.run(probe('bwrap'))
BOX = 'process' if NO_BWRAP else 'bwrap'
bwrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
ROOT = Path(__file__).parent.parent

def built(tmp_path, name): formats.ALL[name](tmp_path); return load_any(tmp_path)[1]
def one(tmp_path, name, **files):
    "The first task of a folder with these files."
    write_files(tmp_path, files)
    return FORMATS[name].load(tmp_path).tasks[0]
async def scores(cases): return [s if s.error else s.score for s in await grading._grade(cases, BOX, 120)]

# ---- all of them

@pytest.mark.parametrize('name', formats.ALL)
def test_a_checkout_says_itself_what_it_is_and_is_a_suite(tmp_path, name, capsys):
    formats.ALL[name](tmp_path)
    assert detect(tmp_path) == [name]
    suite = load_suite(tmp_path)
    refused = load_any(tmp_path)[1].refused
    assert suite and all(t.source['format'] == name and isinstance(t.source['left_out'], list) and t.instruction and t.verifier for t in suite.values())
    assert (f"{len(refused)} of {len(refused) + len(suite)} {name} tasks can't be used here; first: " in capsys.readouterr().err) == bool(refused)
    for t in suite.values(): compile(t.verifier, 'verify.py', 'exec')
    assert all(t.expect == RUBRIC_ONLY or t.expect for t in suite.values()) and all(t.rubric for t in suite.values() if t.expect == RUBRIC_ONLY)

@pytest.mark.parametrize('name', formats.ALL)
def test_what_is_read_is_written_as_ours_and_read_again(tmp_path, name):
    formats.ALL[name](tmp_path/'there')
    r = convert(tmp_path/'there', tmp_path/'ours')
    before, after = {t.task_id: t for t in load_any(tmp_path/'there')[1].tasks}, load_suite(tmp_path/'ours')
    assert {k: t for k, t in before.items()} == after and r['tasks'] == len(after) and r['source_format'] == name and detect(tmp_path/'ours') == ['clawlab']
    assert not [p for p in tmp_path.iterdir() if p.name.startswith('.')]

@pytest.mark.parametrize('name', formats.ALL)
def test_nothing_of_the_solution_or_the_grader_is_in_the_workspace(tmp_path, name):
    for t in built(tmp_path, name).tasks:
        hidden = [c for c in t.expect.get('files', {}).values() if isinstance(c, str) and len(c) > 30]
        assert not any(h in str(c) for h in hidden for c in t.files.values()) and not any(p.split('/')[0] in ('reward', 'tests', 'solution', 'RUBRICS.json', 'grader.py') for p in t.files)

# ---- ClawGym

async def test_fifty_tasks_of_each_split_load_run_and_grade(tmp_path):
    "Right, half right and nothing, over five ways of writing a grader."
    answers = formats.clawgym(tmp_path, 50, 50)
    suite = load_suite(tmp_path)
    assert suite.keys() == answers.keys() and {s: len(select(suite, split=s)) for s in ('train', 'test')} == {'train': 50, 'test': 50}
    cases, want = [], []
    for i, (k, t) in enumerate(suite.items()):
        files, right = [({'output/total.txt': answers[k]}, 1.), ({'output/total.txt': 'wrong'}, .5), ({}, 0.)][i % 3]
        cases.append((t, {**t.files, **files})); want.append(right)
        assert formats.MOUNT not in t.instruction and 'output/total.txt' in t.instruction and set(t.files) <= {'input/numbers.csv', 'input/logo.png'}
    got = [s for i in range(0, 100, 25) for s in await scores(cases[i:i+25])]
    assert got == want
    assert {t.family for t in suite.values()} == {'clawgym', 'Data Analysis', 'Systems'} and any(isinstance(c, bytes) for t in suite.values() for c in t.files.values())

def test_one_split_or_one_task_can_be_pointed_at(tmp_path):
    formats.clawgym(tmp_path, 2, 2)
    assert set(load_suite(tmp_path/'RL/data/clawgym_eval')) == {'task_0000', 'task_0001'} and load_suite(tmp_path/'RL/data/clawgym_train/task_0001')['task_0001'].split == 'train'

async def test_lines_of_the_corpus_and_of_the_benchmark(tmp_path):
    rows = formats.clawgym_rows(6)
    (tmp_path/'syn_task.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows[::2])); (tmp_path/'benchmark_data.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows[1::2]))
    suite = load_suite(tmp_path)
    assert {k: t.split for k, t in suite.items()} == {f'task_{i:02d}_number': 'test' if i % 2 else 'train' for i in range(6)}
    assert await scores([(t, {'output/n.txt': '2'}) for t in suite.values()]) == [1. if '_02_' in k else .5 for k in suite]
    assert suite['task_01_number'].rubric == {'tone': 'Just the number. (in output/n.txt)'} and suite['task_01_number'].family == 'Analysis & Reasoning' and set(suite['task_00_number'].files) == {'input/readme.md'}

def gym(tmp_path, sh, **more): return one(tmp_path, 'clawgym', **formats.clawgym_task(0)[0] | {'reward/reward.sh': sh, **more})

W = formats.MOUNT
@pytest.mark.parametrize('sh, want', [
    ('echo 0.5', .5), ('echo loading; echo; echo 1; echo; echo "  "', 1.), ('printf 0.25', .25), ('echo 1e-1', .1), ('echo \'{"reward": 0.5, "there": true, "right": false}\'', .5), ('echo \'{"score": 1}\'', 1.),
    ('python3 - <<E\nprint(0.125)\nE', .125), (f'test -f {W}/output/total.txt && echo 1', 1.), ('test -f "$1/output/total.txt" && echo 1', 1.), ('test -f ~/.openclaw/workspace/output/total.txt && echo 1', 1.),
    ('test -f "$WORKSPACE/output/total.txt" && echo 1', 1.), ('cd "$(dirname "$0")/.." && test -f output/total.txt && echo 1', 1.), ('test -f reward/check.py && echo 1', 1.), (f'test -f {W}/reward/check.py && echo 1', 1.),
    ('python3 -c "import json, os; d = json.load(open(os.environ[\'OPENCLAW_REWARD_PAYLOAD\'])); print(len(d[\'task_id\'])/10 if d[\'final_message\'] == \'\' and d[\'transcript\'] == [] else 0)"', .9),
    (f'echo x > {W}/output/new && rm {W}/output/total.txt && echo 1', 1.), ('(sleep 60; echo 0) & echo 1', 1.),
    ('true', 'the script printed nothing'), ('echo score: 0.5', "the last line is no score: 'score: 0.5'"), ('echo 1; echo done', 'the last line is no score'), ('echo 1; exit 3', 'the script ended with code 3'), ('set -euo pipefail; false | echo 1', 'the script ended with code 1'),
    ('nonsense', 'the script ended with code 127'), ('echo 1.5', 'a score of 1.5'), ('echo -0.1', 'a score of -0.1'), ('echo nan', 'a score of nan'), ('echo "[1]"', 'TypeError'), ('echo \'{"a": 1, "b": 0}\'', 'no score in'), ('echo "no good" >&2; exit 1', 'code 1: no good'),
])
async def test_what_a_reward_script_may_do_and_how_it_is_read(tmp_path, sh, want):
    t = gym(tmp_path, '#!/bin/bash\n' + sh + '\n')
    s, = await grading._grade([(t, {**t.files, 'output/total.txt': 'x'})], BOX, 60)
    assert (s.score, s.error) == (want, '') if isinstance(want, float) else s.score is None and want in s.error and '\n' not in s.error, s

async def test_a_reward_script_that_hangs_is_ended_with_all_it_started(tmp_path):
    t = gym(tmp_path, 'sleep 77 & while true; do :; done\n')
    s, = await grading._grade([(replace(t, expect=t.expect | {'seconds': .5}), {})], BOX, 60)
    assert s.score is None and 'the script took more than 0.5 s' in s.error

async def test_a_broken_script_is_no_reward_and_a_crash_on_what_the_agent_left_is_none_either(tmp_path):
    t = gym(tmp_path, 'exit 1\n')
    assert (await grade(t, t.files, backend=BOX)).score is None

SPOILT = {'json.py': 'print(1.0); raise SystemExit', 'sys.py': 'raise SystemExit', 'sitecustomize.py': 'print(1.0)', 'usercustomize.py': 'print(1.0)', 'conftest.py': 'import os\nos._exit(0)', 'pytest.ini': '[pytest]\naddopts = --collect-only\n', 'pytest.py': 'print("1 passed")', 'pathlib.py': 'raise SystemExit',
          'setup.cfg': '[tool:pytest]\naddopts = -k nothing\n', '.bashrc': 'echo 1; exit', '.profile': 'echo 1; exit', 'reward/check.py': 'print(\'{"a": 1.0}\')', 'reward/reward.sh': 'echo 1', 'reward/helpers.py': 'def score(ws): return 1.0', 'reward/__pycache__/helpers.cpython-311.pyc': b'\0'*64, 'reward/expected/total.txt': 'mine',
          'tests/test.sh': 'echo 1 > /logs/verifier/reward.txt', 'tests/test_outputs.py': '', 'logs/verifier/reward.txt': '1', 'logs/verifier/reward.json': '{"reward": 1}', 'bin/uvx': '#!/bin/sh\nexit 0', 'grader/grade.py': 'def grade(t, w): return {"a": 1.0}', 'broken': 'x', 'python3': '#!/bin/sh\necho 1\n', 'verify.py': 'def verify(w, e): return 1.0'}

async def test_S47_files_of_the_agent_do_not_become_part_of_a_script_grader(tmp_path):
    gyms = [one(tmp_path/f'g{i}', 'clawgym', **formats.clawgym_task(i)[0]) for i in range(5)]
    others = [one(tmp_path/'h', 'harbor', **formats.harbor_task()), one(tmp_path/'p', 'pinchbench', **{'tasks/task_next.md': formats.page('task_next', 'automated', front=formats.INLINE), 'assets/pictures/a.jpg': b'x'})]
    honest = [(t, dict(t.files)) for t in gyms + others]
    spoilt = [(t, {**files, **SPOILT}) for t, files in honest] + [(gyms[0], {**gyms[0].files, 'reward': 'a file'})]
    assert await scores(honest) == [0.]*7 and await scores(spoilt) == [0.]*8

@pytest.mark.parametrize('run, want, label', [
    ('exit 1', 0., ''), ('exit 0', 1., ''), ('top=${PYTHONPATH%%/shim*}; echo \'{"reward": 1}\' > $top/logs/verifier/reward.json; echo 1 > $top/logs/verifier/reward.txt; exit 1', 0., ''),
    ('top=${PYTHONPATH%%/shim*}; setsid bash -c "while true; do echo 1 > $top/logs/verifier/reward.txt; done" & exit 1', 0., 'gate: left_nothing_running'), ('sleep 50 & exit 0', 1., '')], ids=['fails', 'passes', 'writes', 'daemon', 'background'])
@bwrap
async def test_S47_a_program_of_the_agent_that_the_tests_run_does_not_write_the_score(tmp_path, run, want, label):
    t = one(tmp_path, 'harbor', **formats.harbor_task(**{'tests/test_outputs.py': 'import subprocess\ndef test_a(): assert subprocess.run(["bash", "/app/run.sh"], stdout=subprocess.DEVNULL).returncode == 0\n', 'instruction.md': 'Write run.sh.'}))
    s = await grade(t, {'run.sh': run + '\n'}, backend='bwrap')
    assert (s.score, s.label, s.error) == (want, label, ''), s

async def test_a_wrapped_verifier_sees_the_workspace_without_the_grader(tmp_path):
    "A verifier of ours that punishes litter gives the same score through ClawGym's layout."
    save_suite(chosen := select(load_suite('nano'), n=4), tmp_path/'ours')
    for name in ('clawgym', 'harbor'):
        convert(tmp_path/'ours', tmp_path/name, name); again = {t.task_id: t for t in load_any(tmp_path/name)[1].tasks}
        convert(tmp_path/name, tmp_path/f'{name}-ours'); ours = load_suite(tmp_path/f'{name}-ours')
        assert again.keys() == {t.task_id for t in chosen} == ours.keys()
        played = await play(chosen, BOX)
        cases = [(t, files) for t, (ways, _) in zip(chosen, played) for files in (ways['solution'], ways['habit'], t.files, {**ways['solution'], 'litter': 'x'})]
        want = await scores(cases)
        assert await scores([(again[t.task_id], f) for t, f in cases]) == want == await scores([(ours[t.task_id], f) for t, f in cases[:4]]) + want[4:]
        assert set(want) >= {0., 1., .5} and all((again[t.task_id].steps, again[t.task_id].habit, again[t.task_id].level, again[t.task_id].files) == (t.steps, t.habit, t.level, t.files) for t in chosen)

async def test_there_and_back_through_a_native_layout(tmp_path):
    "ClawGym -> Harbor -> ours and Harbor -> ClawGym -> ours score as the original does."
    formats.clawgym(tmp_path/'gym', 3, 0); formats.harbor(tmp_path/'harbor', 1)
    convert(tmp_path/'gym', tmp_path/'gym-h', 'harbor'); convert(tmp_path/'harbor', tmp_path/'harbor-g', 'clawgym'); convert(tmp_path/'gym', tmp_path/'gym-g', 'clawgym'); convert(tmp_path/'harbor', tmp_path/'harbor-h', 'harbor')
    gym, via = load_suite(tmp_path/'gym'), load_suite(tmp_path/'gym-h')
    left = [{**t.files, 'output/total.txt': '3'} for t in gym.values()]
    assert await scores(list(zip(gym.values(), left))) == await scores(list(zip(via.values(), left))) == await scores(list(zip(load_suite(tmp_path/'gym-g').values(), left))) == [1., .5, .5]
    (a,), (b,), (c,) = (load_suite(tmp_path/d).values() for d in ('harbor', 'harbor-g', 'harbor-h'))
    cases = [formats.SOLVED, {**formats.SOLVED, 'count.txt': '4\n'}, {}]
    assert await scores([(a, f) for f in cases]) == await scores([(b, f) for f in cases]) == await scores([(c, f) for f in cases]) == [1., 0., 0.]
    assert a.files == b.files == c.files == {'words.txt': 'red\ngreen\nblue\n', 'blob.bin': b'\0\xff\x01'}

# ---- Harbor

async def test_a_terminal_bench_task_is_sound_here(tmp_path):
    "Container file, installers, uvx and pytest, solution: 1 for the solution, 0 for nothing and junk."
    t = one(tmp_path, 'harbor', **formats.harbor_task())
    assert await check(t, BOX) == []
    assert t.instruction == 'The file ./words.txt has one word a line. Write them in order to `./sorted.txt`, and how many there are to ./count.txt.' and t.limits == {'seconds': 900, 'cpus': 1, 'memory_mb': 2048, 'verify_seconds': 140}
    assert t.source['left_out'] == ['RUN apt-get update && apt-get install -y jq'] and t.split == 'test' and t.family == 'file-operations'

@pytest.mark.parametrize('docker, root, at, files, left', [
    ('FROM x\nWORKDIR /app\nCOPY . .\n', '/app', '', {'a.txt', 'd/b.txt', 'Dockerfile'}, []),
    ('FROM x\nCOPY a.txt /app/\n', '/app', '', {'a.txt'}, []), ('FROM x\nCOPY a.txt /app/c.txt\n', '/app', '', {'c.txt'}, []), ('FROM x\nWORKDIR /app\nCOPY a.txt .\n', '/app', '', {'a.txt'}, []),
    ('FROM x\nWORKDIR /workspace\nWORKDIR src\nADD ["d", "/workspace/src/d"]\n', '/workspace/src', '', {'d/b.txt'}, []), ('FROM x\nWORKDIR /app/src\nCOPY d /app/d\n', '/app', 'src', {'d/b.txt'}, []),
    ('FROM x\nWORKDIR /app\nCOPY *.txt ./\nRUN mkdir -p /app/out\nRUN pip install \\\n  numpy\nENV A=1\n', '/app', '', {'a.txt'}, ['RUN pip install numpy', 'ENV A=1']),
    ('FROM x AS b\nCOPY a.txt /x\nFROM y\nWORKDIR /app\nCOPY --from=b /x /app/x\nCOPY a.txt /etc/a\n', '/app', '', set(), ['COPY --from=b /x /app/x', 'a file at /etc/a']),
    ('# c\nFROM x\nRUN <<EOF\nCOPY a.txt /app/z\nEOF\nWORKDIR /\nCOPY --chown=1:1 d/ /app/d/\n', '/app', '', {'d/b.txt'}, ['RUN <<EOF'])])
def test_what_a_container_file_leaves(docker, root, at, files, left):
    got = environment(docker, {'a.txt': '1', 'd/b.txt': '2', 'Dockerfile': docker})
    assert (got[0], got[1], set(got[2]), got[3]) == (root, at, files, left)

@pytest.mark.parametrize('tests, want', [
    ('def test_a(): assert True', 1.), ('def test_a(): assert False', 0.), ('def test_a(): raise KeyError', 0.), ('x = 1/0', 0.), ('def helper(): pass', 0.), ('import pytest\n@pytest.mark.skip\ndef test_a(): assert False\ndef test_b(): pass', 1.),
    ('import pytest\n@pytest.mark.parametrize("a,b", [(1, 1), (2, 2)])\n@pytest.mark.parametrize("c", [1, 2])\ndef test_a(a, b, c): assert a == b and c', 1.), ('import pytest\n@pytest.mark.parametrize("a", [1, 2])\ndef test_a(a): assert a == 1', 0.),
    ('import pytest\n@pytest.fixture\ndef n(m): yield m + 1\n@pytest.fixture(scope="module")\ndef m(): return 1\ndef test_a(n, tmp_path): assert n == 2 and tmp_path.is_dir()', 1.),
    ('import pytest\ndef test_a():\n    with pytest.raises(ValueError, match="no"): raise ValueError("no way")\n    assert 0.1 + 0.2 == pytest.approx(0.3) and [1.0] == pytest.approx([1.0000001]) and not 1.0 == pytest.approx(1.1)', 1.), ('import pytest\ndef test_a():\n    with pytest.raises(ValueError): pass', 0.),
    ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n    def test_b(self): self.assertTrue(False)', 0.), ('class TestX:\n    def setup_method(self): self.n = 1\n    def test_a(self): assert self.n == 1\n    @staticmethod\n    def test_b(): pass', 1.),
    ('import pytest\npytestmark = pytest.mark.skip\ndef test_a(): assert False\n', 1.), ('import app_module\ndef test_a(): assert app_module', 0.), ('import sys, subprocess\ndef test_a(): assert subprocess.run(["bash", "/app/run.sh"], capture_output=True).returncode == 0', 0.),
    ('import numpy_like_thing\ndef test_a(): pass', 'the tests import numpy_like_thing'), ('def test_a(capsys): pass', 'the fixture capsys is not known'), ('import pytest\n@pytest.mark.xfail\ndef test_a(): pass', 'xfail is not known'), ('async def test_a(): pass', 'asynchronous'), ('import pytest\n@pytest.fixture(params=[1])\ndef n(): pass', 'is not known here'),
])
async def test_a_page_of_pytest(tmp_path, tests, want):
    "What it knows it runs; what it doesn't know is a broken grader, never a 0."
    t = one(tmp_path, 'harbor', **formats.harbor_task(**{'tests/test_outputs.py': tests, 'instruction.md': 'Write app_module.py and run.sh.'}))
    s, = await grading._grade([(t, {**t.files, 'run.sh': 'exit 1\n'})], BOX, 60)
    assert (s.score, s.error) == (want, '') if isinstance(want, float) else s.score is None and want in s.error, s

@pytest.mark.parametrize('sh, want', [
    ('echo 0.75 > /logs/verifier/reward.txt; exit 1', .75), ('echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', .5), ('echo \'{"style": 1, "speed": 0, "note": "x"}\' > /logs/verifier/reward.json; echo 0.25 > /logs/verifier/reward.txt', .25), ('echo \'{"accuracy": 0.5}\' > /logs/verifier/reward.json', .5),
    ('python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt', 1.), ('pytest /tests -v --tb=short; echo $(( $? == 0 )) > /logs/verifier/reward.txt', 1.), ('test -f words.txt -a "$PWD" = "$(cd /app && pwd)" -a -f "$TEST_DIR/test.sh" && echo 1 > /logs/verifier/reward.txt', 1.),
    ('uvx --with pytest==8.4.1 --with pytest-json-ctrf==0.3.5 pytest --ctrf=/logs/verifier/ctrf.json "/tests/test_outputs.py::TestCount" -rA\npython3 -c "import json; s = json.load(open(\'/logs/verifier/ctrf.json\'))[\'results\'][\'summary\']; print(s[\'passed\']/s[\'tests\'])" > /logs/verifier/reward.txt', 1.),
    ('true', 'the script wrote no logs/verifier/reward.json or logs/verifier/reward.txt'), (': > /logs/verifier/reward.txt', 'is empty'), ('echo yes > /logs/verifier/reward.txt', 'holds no score'), ('echo 2 > /logs/verifier/reward.txt', 'a score of 2'), ('cargo test; echo 0 > /logs/verifier/reward.txt', 'the tests run cargo'),
    ('curl -s http://localhost:8080/ | grep -q ok || echo 0 > /logs/verifier/reward.txt', 'a server of the agent'), ('uvx --with harbor-rewardkit rewardkit /tests; echo 0 > /logs/verifier/reward.txt', 'uvx has no network'), ('pytest -k sorted /tests; echo 0 > /logs/verifier/reward.txt', 'option -k'),
])
async def test_what_a_test_script_may_do_and_how_it_is_read(tmp_path, sh, want):
    t = one(tmp_path, 'harbor', **formats.harbor_task(**{'tests/test.sh': '#!/bin/bash\n' + sh + '\n'}))
    s, = await grading._grade([(t, formats.SOLVED)], BOX, 60)
    assert (s.score, s.error) == (want, '') if isinstance(want, float) else s.score is None and want in s.error, s

async def test_a_solution_with_folders_and_files_of_its_own(tmp_path):
    t = one(tmp_path, 'harbor', **formats.harbor_task(**{'solution/solve.sh': '#!/bin/bash\nmkdir -p /app/tmp && cd /app/tmp\ncp /solution/data/part.bin x\npython3 "$(dirname "$0")/sort.py"\ncd .. && rm -r tmp\n', 'solution/data/part.bin': b'\0\1', 'solution/sort.py': 'w = open("/app/words.txt").read().split()\nopen("/app/sorted.txt", "w").write("\\n".join(sorted(w)))\nopen(\'/app/count.txt\', "w").write(str(len(w)))\n'}))
    assert len(t.steps) == 1 and await check(t, BOX) == []

def test_what_a_harbor_task_leaves_out_is_said(tmp_path):
    toml = formats.TOML + 'gpus = 1\nallow_internet = true\nmcp_servers = [{name = "x", transport = "stdio", command = "x"}]\n[environment.env]\nKEY = "${KEY}"\n'
    t = one(tmp_path, 'harbor', **formats.harbor_task(**{'task.toml': toml.replace('timeout_sec = 120.0', 'timeout_sec = 120.0\nenv = {API_KEY = "${API_KEY}", MODE = "fast"}'), 'environment/docker-compose.yaml': 'services: {main: {build: .}, db: {image: postgres}}\n', 'instruction.md': 'Edit /etc/hosts and /app/x.', 'tests/test_outputs.py': 'import numpy\n'}))
    assert t.source['left_out'] == ['RUN apt-get update && apt-get install -y jq', 'gpus: 1', 'mcp_servers: [{"name": "x", "transport": "stdio", "command": "x"}]', 'env: {"KEY": "${KEY}"}', 'the network', 'other containers: main, db', 'the variable API_KEY of the verifier', 'package numpy of the tests, if the grading sandbox lacks it', '/etc/hosts is a place outside the workspace']
    assert t.expect['env']['MODE'] == 'fast' and 'API_KEY' not in t.expect['env']

# ---- PinchBench, QwenClawBench, Claw-Eval, tables

async def test_pages_are_scored_by_their_block(tmp_path):
    got = built(tmp_path, 'pinchbench')
    assert set(got.refused) == {'task_bare', 'task_second_brain'}
    coded, judged, hybrid = got.tasks
    assert await scores([(t, f) for t in (coded, hybrid) for f in ({'next.txt': 'call Ada'}, {'next.txt': 'x'}, {})]) == [1., .5, 0.]*2
    s, = await grading._grade([(judged, {'next.txt': 'x'})], BOX, 60)
    assert judged.expect == RUBRIC_ONLY and s.score is None and not s.error and list(judged.rubric) == ['Precision', 'Form'] and judged.rubric['Form'] == '**Score 1.0**: One line.' and not coded.rubric
    assert hybrid.files == {'notes/todo.txt': 'x buy milk\ncall Ada\n', 'a.jpg': b'\xff\xd8\xff\0'} and hybrid.limits == {'seconds': 120} and 'Read notes/todo.txt' in hybrid.instruction and 'Expected' not in hybrid.instruction

async def test_a_page_of_qwenclawbench_brings_its_assets(tmp_path):
    t, = built(tmp_path, 'qwenclawbench').tasks
    assert set(t.files) == {'notes/todo.txt', 'data.bin'} and any('a judge counts whatever the code score is' in x for x in t.source['left_out']) and await scores([(t, {'next.txt': 'call Ada'})]) == [1.]

@pytest.mark.parametrize('checks, want', [('def grade(transcript, workspace_path):\n    return {"a": True, "b": 0, "note": "x"}\n', .5), ('def grade(transcript, workspace_path):\n    print("1.0"); import atexit; atexit.register(print, 1.0); return {"a": 0.25}\n', .25), ('def grade(transcript, workspace_path):\n    return {}\n', 0.),
                                           ('def grade(transcript, workspace_path):\n    import sys; sys.path.insert(0, workspace_path); import mine; return {"a": mine.x}\n', .75), ('def grade(transcript, workspace_path):\n    return 1/0\n', 'ZeroDivisionError'), ('def grade(transcript, workspace_path):\n    return 0.5\n', 'grade gave 0.5')])
async def test_blocks_of_all_kinds(tmp_path, checks, want):
    t = one(tmp_path, 'pinchbench', **{'task_a.md': formats.page('task_a', 'automated', checks=checks)})
    s, = await grading._grade([(t, {'mine.py': 'x = .75\n'})], BOX, 60)
    assert (s.score, s.error) == (want, '') if isinstance(want, float) else s.score is None and want in s.error, s

async def test_keywords_of_claw_eval(tmp_path):
    t, = built(tmp_path, 'claweval').tasks
    assert await scores([(t, {'answer.md': a}) for a in ('order 7: 19.90, order 8: 25', '19.90 and 25', 'order 7')] + [(t, {})]) == pytest.approx([1, 2/3, 1/3, 0])
    assert t.rubric == {'manner': 'Polite.\n(from the rubric of the whole:) Judge the manner.'} and t.files['fixtures/scan.png'] == b'\x89PNG\0' and 'Read ./fixtures/orders.csv' in t.instruction and t.instruction.endswith('`answer.md` in the workspace.')
    assert left_out([t]) == {k: 1 for k in ('grader.py', 'a check', 'services', 'tools', 'safety_checks')}
    (tmp_path/'table.jsonl').write_text(json.dumps(dict(task_id='T9', query='Say hello in /workspace/x.', fixture=['a.json'], language='en', category='chat', rubric='Warm.')) + '\n' + json.dumps(dict(task_id='T8', query='x', fixture=[], language='en', category='chat')) + '\n')
    assert {t.task_id for t in load_any(tmp_path)[1].tasks} == {'T01en_refund', 'T9'}

async def test_short_answers_and_claims(tmp_path):
    office = built(tmp_path/'o', 'officeqa')
    assert [t.task_id for t in office.tasks] == ['UID0001', 'UID0003', 'UID0002'] and [t.level for t in office.tasks] == [2, 1, 1]
    answers = [['7,103', '7103 million', '<FINAL_ANSWER>7150</FINAL_ANSWER>', '7,200', '1 2 3 4 7103'], ['the federal old-age and survivors insurance trust fund', 'Trust Fund'], ['March 1977', 'It was March, 1977.', '1977', 'April 1977']]
    assert [await scores([(t, {'answer.txt': a}) for a in tries]) for t, tries in zip(office.tasks, answers)] == [[1., 1., 1., 0., 0.], [1., 0.], [1., 1., 0., 0.]]
    assert [await check(t, BOX) for t in office.tasks] == [[]]*3
    atlas = built(tmp_path/'a', 'mcp-atlas')
    assert atlas.tasks[0].rubric == {'claim 1': 'The answer supports: The average profit was $6,446.20.', 'claim 2': "The answer supports: The shop's difference was $340.40."} and atlas.tasks[0].source['left_out'][0] == 'tools: 3 of the servers calculator, ddg-search, filesystem'
    jobs = built(tmp_path/'j', 'jobbench')
    main_, easy = jobs.tasks
    assert (main_.task_id, main_.level, easy.task_id, easy.level) == ('actuaries__task1', 2, 'actuaries__task1__easy', 1) and main_.rubric['1'].startswith('Is the event rate 20.2%?\nAll of these must hold:\n- computes 236/1166') and main_.files['data.csv'] == 'a,b\r\n1,2\r\n' and main_.files['book.xlsx'] == b'PK\3\4\0\xff'

def test_tables_as_parquet(tmp_path):
    pq = pytest.importorskip('pyarrow.parquet'); import pyarrow as pa
    rubric = json.dumps({'rubrics': [{'rubric': 'Right?', 'weight': 1}]})
    pq.write_table(pa.Table.from_pylist([dict(task_id='lawyers__task1', occupation='lawyers', task_num=1, prompt='Write it.', reference_files=['dataset/lawyers/task1/task_folder/a.txt', 'dataset/none.txt'], rubric_json=rubric)]), tmp_path/'tasks.parquet')
    write_files(tmp_path, {'dataset/lawyers/task1/task_folder/a.txt': 'x'})
    (t,), refused = load_any(tmp_path)[1]
    assert t.files == {'a.txt': 'x'} and t.source['left_out'] == ['a reference file: dataset/none.txt is not in this checkout'] and not refused
    (tmp_path/'tasks.parquet').write_bytes((tmp_path/'tasks.parquet').read_bytes()[:40])
    with pytest.raises(InputError): load_any(tmp_path)

# ---- paths and parts

def test_paths_end_where_names_end():
    for text, want in {'cd /app && ls': 'cd ./ && ls', 'Read /app/a.csv.': 'Read ./a.csv.', '/apple /app-x /app.py http://h/app x/app': '/apple /app-x /app.py http://h/app x/app', '"/app/$X" (/app) `/app/`': '"./$X" (./) `./`', '--root=/app:/app/x': '--root=./:./x', '/app/app/app': './app/app', '${R}/app ~/app': '${R}/app ~/app'}.items(): assert to_workspace(text, '/app') == want
    assert to_workspace('/w/x/a and /w/b', '/w', '/w/x') == './a and ./b' and outside('see /etc/a.b, /tmp/x. and http://a/tmp/x') == ['/etc/a.b', '/tmp/x']

def test_rubrics_of_all_shapes():
    assert rubric_of(None) == rubric_of('') == rubric_of([]) == {} and rubric_of('Nice.') == {'rubric': 'Nice.'} and rubric_of('{"a": "b"}') == {'a': 'b'} and rubric_of({'a': 'b'}) == {'a': 'b'}
    assert rubric_of({'rules': [{'name': 'a', 'rule': 'x'}, {'name': 'a', 'rule': 'y'}, 'z']}) == {'a': 'x', 'a 2': 'y', '3': 'z'} and rubric_of({'a': {'description': 'x'}}) == {'a': 'x'}

# ---- broken data: one line, and nothing else

BROKEN = {
    'clawgym': [('RL/data/clawgym_train/task_0000/data_entry.json', '{"task_id": ', 'data_entry.json: Expecting value'), ('RL/data/clawgym_train/task_0000/data_entry.json', b'\xff\xfe\0', 'not UTF-8 text'), ('RL/data/clawgym_train/task_0000/data_entry.json', '[1]', 'holds a list, not a dict'),
                ('RL/data/clawgym_train/task_0000/data_entry.json', '{"task_id": "x"}', 'user_query: missing'), ('RL/data/clawgym_train/task_0000/data_entry.json', '{"task_id": "x", "user_query": "q", "metadata": 3}', 'metadata is no object'), ('RL/data/clawgym_train/task_0000/data_entry.json', '{"task_id": "x", "user_query": "q", "input_mount_dir": "x"}', 'no absolute path'),
                ('RL/data/clawgym_train/task_0000/reward/reward.sh', None, 'no reward/reward.sh'), ('RL/data/clawgym_train/task_0000/input_files/input/numbers.csv', 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n', 'git lfs pull')],
    'harbor': [('sort-words-0/task.toml', '[environment\n', 'task.toml: '), ('sort-words-0/task.toml', 'environment = 3\n', 'environment is no table'), ('sort-words-0/task.toml', '[agent]\ntimeout_sec = -1\n', 'no positive number'), ('sort-words-0/task.toml', '[environment]\nmemory = "much"\n', 'is no size'), ('sort-words-0/tests/test.sh', None, 'no tests/test.sh'),
               ('sort-words-0/instruction.md', None, 'no instruction.md'), ('sort-words-0/instruction.md', b'\xff', 'not UTF-8 text'), ('sort-words-0/instruction.md', ' \n', 'instruction: '), ('sort-words-0/steps/1/instruction.md', 'x', 'several steps'), ('sort-words-0/environment/docker-compose.yaml', 'a: [', 'docker-compose.yaml: ')],
    'pinchbench': [('tasks/task_next.md', '---\nid: [\n---\n\n## Prompt\nx\n', 'task_next.md: '), ('tasks/task_next.md', formats.page('task_next', 'magic'), "grading_type: 'magic'"), ('tasks/task_next.md', formats.page('task_next', front='workspace_files: [gone.txt]\n'), 'workspace_files: no gone.txt'), ('tasks/task_next.md', formats.page('task_next', checks='def grade(:\n'), 'Automated Checks: '), ('tasks/task_next.md', formats.page('task_next', 'llm_judge', rubric=False).replace('- [ ]', '*'), 'no rubric'),
                   ('tasks/task_next.md', formats.page('task_next', front='workspace_files:\n  - {path: ../../x, content: y}\n'), 'not a path inside the workspace'), ('tasks/task_next.md', formats.page('task_next', front='workspace_files:\n  - {path: /etc/x, content: y}\n'), 'not a path inside the workspace'), ('tasks/task_next.md', formats.page('task_next', front='workspace_files:\n  - {source: ../../../etc/hostname, dest: x}\n'), 'workspace_files: no '), ('tasks/task_next.md', formats.page('task_next', prompt=''), 'instruction: ')],
    'claweval': [('tasks/T01en_refund/task.yaml', 'task_id: a\nprompt: {text: [\n', 'task.yaml: '), ('tasks/T01en_refund/task.yaml', 'task_id: a\nprompt: 3\n', 'prompt.text'), ('tasks/T01en_refund/task.yaml', 'task_id: a\nprompt: {text: x}\nscoring_components: [{name: a}]\n', 'one without name')],
    'officeqa': [('officeqa_pro.csv', 'uid,question,answer\nU1,q,\n', 'no answer'), ('officeqa_pro.csv', b'uid,question,answer\nU1,\xff,a\n', 'not UTF-8 text'), ('officeqa_pro.csv', 'uid,question,answer\nU1,"q,a\n', 'officeqa_pro.csv: ')],
    'jobbench': [('dataset/actuaries/task1/RUBRICS.json', '{"rubrics": [', 'RUBRICS.json: '), ('dataset/actuaries/task1/RUBRICS.json', '{"rubrics": []}', 'no rubric')]}

@pytest.mark.parametrize('name, at, content, said', [(n, *case) for n, cases in BROKEN.items() for case in cases])
def test_what_is_broken_is_said_in_one_line(tmp_path, name, at, content, said):
    formats.ALL[name](tmp_path)
    (tmp_path/at).unlink() if content is None else write_files(tmp_path, {at: content})
    try: got = FORMATS[name].load(tmp_path).refused
    except InputError as e: got = {'': str(e)}
    assert [w for w in got.values() if said in w and '\n' not in w], got

def test_links_special_files_and_large_ones_are_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(base, 'LARGEST', 1000)
    files, _ = formats.clawgym_task(1); d = tmp_path/'data'/'task_0001'
    write_files(d, files | {'input_files/big.csv': 'x'*2000, 'input_files/.git/HEAD': 'ref: x\n'}); write_files(tmp_path, {'secret': 'S'})
    inside = d/'input_files'
    (inside/'out').symlink_to(tmp_path/'secret'); (inside/'tree').symlink_to(tmp_path); (inside/'gone').symlink_to('nowhere'); (inside/'again').symlink_to('input/numbers.csv'); (inside/'self').symlink_to('self'); os.mkfifo(inside/'pipe')
    t, = load_any(tmp_path/'data')[1].tasks
    assert set(t.files) == {'input/numbers.csv', 'again'} and t.files['again'] == t.files['input/numbers.csv']
    assert sorted(t.source['left_out']) == sorted(["'gone': broken link or name", "'self': broken link or name", 'big.csv: too large, 0 MiB', 'out: a link that leads out', 'pipe: no regular file', 'tree: a link that leads out', '.git: a history may hold the solution'])
    (d/'reward'/'check.py').unlink(); (d/'reward'/'check.py').symlink_to(tmp_path/'secret')
    assert 'a link that leads out' in FORMATS['clawgym'].load(tmp_path/'data').refused['task_0001']

def test_a_download_cache_links_to_its_store_and_a_linked_folder_to_anywhere(tmp_path):
    "`snapshots/REVISION/...` of a Hugging Face cache are links to `blobs/`; a whole folder that is a link out is left out."
    files, _ = formats.clawgym_task(1); store = tmp_path/'datasets--x'/'blobs'; store.mkdir(parents=True)
    for i, (p, c) in enumerate(files.items()):
        write_files(store, {f'{i:064x}': c}); at = tmp_path/'datasets--x/snapshots/main/task_0001'/p
        at.parent.mkdir(parents=True, exist_ok=True); at.symlink_to(store/f'{i:064x}')
    t, = load_suite(tmp_path/'datasets--x/snapshots/main').values()
    assert set(t.files) == {'input/numbers.csv'} and 'ws/reward/reward.sh' in t.expect['files'] and t.source['left_out'] == []
    write_files(d := tmp_path/'other'/'task_0001', files); shutil.rmtree(d/'input_files'); (d/'input_files').symlink_to('/etc'); write_files(tmp_path, {'say': 'secret'})
    t, = load_suite(tmp_path/'other').values()
    assert not t.files and t.source['left_out'] == ['input_files: a link that leads out']
    (d/'data_entry.json').unlink(); (d/'data_entry.json').symlink_to(tmp_path/'say')
    with pytest.raises(InputError, match='data_entry.json: a link that leads out'): load_suite(tmp_path/'other')

def test_data_grants_itself_no_hosts(tmp_path):
    t = one(tmp_path, 'clawgym', **formats.clawgym_task(0, metadata={'clawlab': {'egress': 'everything', 'steps': ['true'], 'level': 2, 'tools': ['x'], 'verifier': 'x'}})[0])
    assert (t.egress, t.tools, t.level, t.steps) == ('', (), 2, ('true',))

@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(formats.ALL)), st.integers(0, 10**6), st.sampled_from(['cut', 'noise', 'gone', 'empty', 'json', 'folder', 'deep']))
def test_any_damage_is_a_line_or_a_task(tmp_path_factory, name, seed, damage):
    "Whatever happens to one file of a checkout: tasks, refusals or one `InputError`, and never another exception."
    d, rng = tmp_path_factory.mktemp('x'), random.Random(seed)
    formats.ALL[name](d)
    f = rng.choice(sorted(p for p in d.rglob('*') if p.is_file())); data = f.read_bytes()
    if damage == 'cut': f.write_bytes(data[:rng.randrange(len(data) + 1)])
    elif damage == 'noise': f.write_bytes(data[:(i := rng.randrange(len(data) + 1))] + rng.randbytes(rng.randrange(1, 9)) + data[i:])
    elif damage == 'json': f.write_text(rng.choice(['null', '[]', '{}', '3', '[[[', '{"a": NaN}', '"x"', '- a: &a [*a]']))
    elif damage == 'deep': f.write_text('['*100_000)
    elif damage == 'empty': f.write_bytes(b'')
    else:
        f.unlink()
        if damage == 'folder': f.mkdir()
    try:
        for t in load_any(d)[1].tasks: assert isinstance(t, Task) and t.instruction.strip() and '\n' not in t.task_id
    except InputError as e: assert '\n' not in str(e)
    shutil.rmtree(d)

def test_nothing_fits_and_two_fit(tmp_path):
    with pytest.raises(InputError, match='no train.jsonl, validation.jsonl, test.jsonl with a verify.py in this folder, and no other format fits'): load_suite(tmp_path)
    formats.harbor(tmp_path, 1); formats.officeqa(tmp_path)
    with pytest.raises(InputError, match='fits harbor and officeqa; convert it first: .* --source harbor'): load_suite(tmp_path)
    assert convert(tmp_path, tmp_path.with_name('to'), source_name='officeqa')['tasks'] == 3

# ---- by hand

def out(capsys): return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

def test_convert_by_hand(tmp_path, capsys):
    formats.pinchbench(tmp_path/'p')
    assert main(['tasks', 'convert', str(tmp_path/'p'), str(tmp_path/'o')]) == 0
    err = (got := capsys.readouterr()).err; r = json.loads(got.out.strip().splitlines()[-1])
    assert r['tasks'] == 3 and set(r['refused']) == {'task_bare', 'task_second_brain'} and 'refused   task_bare: no front matter' in err and 'left out  weights of the criteria (2 tasks)' in err and r['splits'] == {'test': 3}
    for args, said in ((['p', 'o'], 'is there already'), (['p', 'x', '--format', 'magic'], "unknown format 'magic'"), (['p', 'x', '--format', 'jobbench'], 'can be read and not written'), (['p', 'x', '--split', 'dev'], "split 'dev'"), (['none', 'x'], 'no such folder'), (['p', 'x', '--source', 'harbor'], 'no harbor task can be used')):
        assert main(['tasks', 'convert', *(str(tmp_path/a) if a in 'pox' or a == 'none' else a for a in args)]) == 2
        assert said in (err := capsys.readouterr().err) and err.count('\n') == 1, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ['o', 'p']
    assert main(['tasks', 'convert', str(tmp_path/'o'), str(tmp_path/'g'), '--format', 'clawgym', '--split', 'train']) == 0
    r = out(capsys); assert r['refused'] == {'task_judged': 'it is scored by its rubric alone'} and r['splits'] == {'train': 2} and (tmp_path/'g/clawgym_train/task_coded/reward/reward.sh').is_file()

def test_show_and_formats_by_hand(tmp_path, capsys):
    formats.claweval(tmp_path)
    assert main(['tasks', 'show', str(tmp_path)]) == 0 and (r := out(capsys))['source'] == {'claweval': 1} and r['judged'] == 1
    assert main(['tasks', 'show', str(tmp_path), 'T01en_refund']) == 0 and 'Read ./fixtures' in out(capsys)['instruction']
    assert main(['tasks', 'show', str(tmp_path), 'x']) == 2 and main(['tasks', 'formats']) == 0 and set(out(capsys)) == set(FORMATS)

def test_a_conversion_that_is_interrupted_leaves_no_suite_and_can_be_repeated(tmp_path, monkeypatch):
    formats.harbor(tmp_path/'h')
    def killed(tasks, to): FORMATS['clawgym'].save(tasks[:1], to); raise KeyboardInterrupt
    monkeypatch.setitem(FORMATS, 'half', replace(FORMATS['clawgym'], name='half', save=killed))
    with pytest.raises(KeyboardInterrupt): convert(tmp_path/'h', tmp_path/'to', 'half')
    assert [p.name for p in tmp_path.iterdir()] == ['h']
    stale = next(p for p in range(2**22, 2, -1) if not Path(f'/proc/{p}').exists())
    write_files(tmp_path/f'.to.{stale}', {'clawgym_test/x/data_entry.json': '{'})
    assert convert(tmp_path/'h', tmp_path/'to', 'clawgym')['tasks'] == 3 and sorted(p.name for p in tmp_path.iterdir()) == ['h', 'to']

@bwrap
def test_check_by_hand_on_a_checkout(tmp_path, capsys):
    formats.harbor(tmp_path/'h', 2); formats.jobbench(tmp_path/'j'); formats.clawgym(tmp_path/'g', 3, 0)
    assert main(['tasks', 'check', str(tmp_path/'h')]) == 0 and (r := out(capsys))['ok'] and r['unsolved'] == 0
    assert main(['tasks', 'check', str(tmp_path/'j')]) == 0 and out(capsys)['judged'] == 2
    assert main(['tasks', 'check', str(tmp_path/'g')]) in (0, 2) and out(capsys)['unsolved'] == 3

@bwrap
def test_a_rollout_is_pointed_at_a_checkout(tmp_path, capsys):
    "ClawGym's layout, a real harness, the oracle: every reward is 1."
    save_suite(select(load_suite('nano'), n=3, split='test'), tmp_path/'ours'); convert(tmp_path/'ours', tmp_path/'gym', 'clawgym'); formats.harbor(tmp_path/'harbor', 1)
    for d, n in (('gym', 3), ('harbor', 1)):
        assert main(['rollout', '--tasks', str(tmp_path/d), '--harness', 'react', '--n', str(n), '--engine', 'oracle', '--store', str(tmp_path/f'{d}.db'), '--split', 'test']) == 0
        r = out(capsys); assert len(r['rollouts']) == n and {x['outcome'] for x in r['rollouts']} == {'ok'} and r['cells']['react']['mean_score'] == 1, r
