"Small checkouts, faithful to the public layouts as far as these are documented; all content is made up here."
import json
from pathlib import Path
from clawlab.launch.formats.base import write_files

MOUNT = '/root' + '/.openclaw/workspace'

# ---- ClawGym: a folder a task; five ways in which graders are written

NAMED = "import json, sys\nfrom pathlib import Path\ndef grade(ws):\n    f = Path(ws)/'output'/'total.txt'\n    ok = f.is_file()\n    return {'file_exists': float(ok), 'content_correct': float(ok and f.read_text().strip() == '%d')}\nif __name__ == '__main__': print(json.dumps(grade(sys.argv[1] if len(sys.argv) > 1 else '.')))\n"
WITH_TRANSCRIPT = "import json, sys\nfrom pathlib import Path\ndef grade(transcript: list, workspace_path: str) -> dict:\n    f = Path(workspace_path)/'output'/'total.txt'\n    return {'file_exists': float(f.is_file()), 'content_correct': float(f.is_file() and f.read_text().strip() == '%d')}\nif __name__ == '__main__': print(json.dumps(grade([], sys.argv[1])))\n"
AVERAGE = f"#!/usr/bin/env bash\nset -euo pipefail\n\npython3 {MOUNT}/reward/check.py {MOUNT} | python3 -c 'import json, sys; raw = sys.stdin.read().strip(); data = json.loads(raw); print(sum(float(v) for v in data.values()) / len(data) if isinstance(data, dict) and data else float(data) if isinstance(data, (int, float)) else 0.0)'\n"
WAYS = [
    {'check.py': NAMED, 'reward.sh': AVERAGE},
    {'check.py': WITH_TRANSCRIPT, 'reward.sh': AVERAGE},
    {'check.py': NAMED.replace("print(json.dumps(grade(", "print('grading'); d = grade(").replace("else '.')))", "else '.'); print(json.dumps({'reward': sum(d.values())/2, 'ok': d['content_correct'] == 1}))"), 'reward.sh': '#!/bin/bash\npython3 reward/check.py ' + MOUNT + '\n'},
    {'check.py': "import sys, helpers\nprint(helpers.score(sys.argv[1]))\n", 'helpers.py': "from pathlib import Path\nHERE = Path(__file__).parent\ndef score(ws):\n    f = Path(ws)/'output'/'total.txt'\n    want = (HERE/'expected'/'total.txt').read_text()\n    return (f.is_file() + (f.is_file() and f.read_text().strip() == want))/2\n", 'expected/total.txt': '%d', 'reward.sh': '#!/bin/bash\nset -e\ncd "$(dirname "$0")"\nexec python3 check.py "$(cd .. && pwd)"\n'},
    {'reward.sh': '#!/bin/sh\nf=$HOME/.openclaw/workspace/output/total.txt\nif [ ! -f "$f" ]; then echo 0; elif [ "$(cat "$f")" = "%d" ]; then echo "all good" >&2; echo 1.0; else echo 0.5; fi\n'}]

def clawgym_task(i: int, **entry) -> tuple[dict, str]:
    "Files of one task, and the right content of output/total.txt."
    a, b = 3*i + 1, 7*i + 2
    reward = {p: c.replace('%d', str(a + b)) for p, c in WAYS[i % len(WAYS)].items()}
    e = dict(task_id=f'task_{i:04d}', user_query=f'Add the two numbers of input/numbers.csv for client {i} and write the total to {MOUNT + "/" if i % 2 else ""}output/total.txt. All file paths are relative to the workspace directory.',
             metadata={'category': ['', 'Data Analysis', 'Systems'][i % 3], 'grading_type': 'automated'}, input_mount_dir=MOUNT) | entry
    return {'data_entry.json': json.dumps(e, indent=2, ensure_ascii=False) + '\n', 'input_files/input/numbers.csv': f'n\n{a}\n{b}\n', **({'input_files/input/logo.png': b'\x89PNG\0\xff' + bytes([i % 256])} if i % 4 == 0 else {}), **{f'reward/{p}': c for p, c in reward.items()}}, str(a + b)

def clawgym(root: Path, train: int = 50, evaluation: int = 50) -> dict[str, str]: # task -> right answer
    "A checkout of the repository with both splits below RL/data."
    answers = {}
    for split, n, at in (('clawgym_train', train, 0), ('clawgym_eval', evaluation, 1000)):
        for i in range(n):
            files, answers[f'{split}.task_{i:04d}'] = clawgym_task(at + i, task_id=f'task_{i:04d}')
            write_files(root/'RL'/'data'/split/f'task_{i:04d}', files)
    write_files(root, {'README.md': '# Agents\n', 'RL/data/DATASET_README.md': '# Datasets\n', 'RL/data/build_dataset_from_hf.py': 'pass\n', 'SFT/launch_scripts/example.sh': '#!/bin/bash\n'})
    return answers

def clawgym_rows(n: int) -> list[dict]:
    "Lines of the corpus (even) and of the benchmark, with a rubric (odd)."
    return [dict(prompt=f'Write {i} to output/n.txt.', hook_code=f'python3 reward/test.py {MOUNT}', hook_lang='bash', input_files=[{'file_path': 'input/readme.md', 'content': 'x\n'}, {'file_path': 'reward/test.py', 'file_format': 'py', 'content': f"import json, sys\nfrom pathlib import Path\nf = Path(sys.argv[1])/'output/n.txt'\nprint(json.dumps({{'there': f.is_file(), 'right': f.is_file() and f.read_text() == '{i}'}}))\n"}],
                 rule=None if i % 2 == 0 else None, origin_template=f'---\nid: task_{i:02d}_number\nname: x\n---\n', **({'rules': [{'name': 'tone', 'target_file': 'output/n.txt', 'rule': 'Just the number.'}], 'macro_category': 'Analysis & Reasoning'} if i % 2 else {})) for i in range(n)]

# ---- Harbor / Terminal-Bench 2

TEST_SH = '''#!/bin/bash
# BENCHMARK-STYLE SCRIPT, MADE UP
apt-get update
apt-get install -y curl

curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env

if [ "$PWD" = "/" ]; then echo "Error: No working directory set."; exit 1; fi

uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
'''
TOML = '''version = "1.0"

[metadata]
author_name = "Nobody"
difficulty = "easy"
category = "file-operations"
tags = ["words"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
docker_image = "example/sort-words:20251031"
cpus = 1
memory = "2G"
storage = "10G"
'''
def harbor_task(**files) -> dict:
    "A task whose tests are functions with plain asserts; keys use __ for / and _dot_ for a dot."
    return {'task.toml': TOML, 'instruction.md': 'The file /app/words.txt has one word a line. Write them in order to `/app/sorted.txt`, and how many there are to /app/count.txt.\n',
            'environment/Dockerfile': 'FROM ubuntu:24.04\n\nRUN apt-get update && \\\n    apt-get install -y jq\n\nWORKDIR /app\nCOPY words.txt blob.bin /app/\n', 'environment/words.txt': 'red\ngreen\nblue\n', 'environment/blob.bin': b'\0\xff\x01',
            'tests/test.sh': TEST_SH, 'tests/test_outputs.py': 'import os\nfrom pathlib import Path\n\nAPP = Path("/app")\n\ndef test_sorted():\n    "In order."\n    assert (APP/"sorted.txt").read_text().split() == ["blue", "green", "red"]\n\nclass TestCount:\n    def test_count(self): assert (APP/"count.txt").read_text().strip() == "3"\n    def test_source_is_untouched(self): assert Path("/app/words.txt").read_text() == "red\\ngreen\\nblue\\n" and os.path.getsize("/app/blob.bin") == 3\n',
            'solution/solve.sh': '#!/bin/bash\nset -euo pipefail\ncd /app\nsort words.txt > /app/sorted.txt\nwc -l < /app/words.txt > count.txt\n'} | files

SOLVED = {'sorted.txt': 'blue\ngreen\nred\n', 'count.txt': '3\n', 'words.txt': 'red\ngreen\nblue\n', 'blob.bin': b'\0\xff\x01'}

def harbor(root: Path, n: int = 3):
    for i in range(n): write_files(root/f'sort-words-{i}', harbor_task())

# ---- PinchBench and QwenClawBench

def page(name: str, kind='hybrid', front='', checks=None, prompt='Read notes/todo.txt and write the first open item to next.txt.', rubric=True) -> str:
    checks = checks if checks is not None else 'def grade(transcript: list, workspace_path: str) -> dict:\n    from pathlib import Path\n    f = Path(workspace_path)/"next.txt"\n    ok = f.exists()\n    return {"file_created": 1.0 if ok else 0.0, "right_item": 1.0 if ok and "call Ada" in f.read_text() else 0.0}\n'
    return f'---\nid: {name}\nname: Next item\ncategory: productivity\ngrading_type: {kind}\ntimeout_seconds: 120\ngrading_weights:\n  automated: 0.6\n  llm_judge: 0.4\n{front}---\n\n## Prompt\n\n{prompt}\n\n---\n\n## Expected Behavior\n\nThe agent reads the list.\n\n## Grading Criteria\n\n- [ ] File `next.txt` created\n- [ ] It holds the first open item\n\n' + \
        (f'## Automated Checks\n\n```python\n{checks}```\n\n' if checks else '') + ('## LLM Judge Rubric\n\n### Criterion 1: Precision (Weight: 60%)\n\n**Score 1.0**: Exactly the item.\n**Score 0.0**: Anything else.\n\n### Criterion 2: Form (Weight: 40%)\n\n**Score 1.0**: One line.\n\n## Additional Notes\n\nNone.\n' if rubric else '')

INLINE = 'workspace_files:\n  - path: "notes/todo.txt"\n    content: |\n      x buy milk\n      call Ada\n  - source: pictures/a.jpg\n    dest: a.jpg\n'

def pinchbench(root: Path):
    write_files(root, {'tasks/manifest.yaml': 'tasks:\n  - task_next\n', 'tasks/task_next.md': page('task_next', front=INLINE), 'tasks/task_judged.md': page('task_judged', 'llm_judge', front=INLINE, checks=''), 'tasks/task_coded.md': page('task_coded', 'automated', front=INLINE),
                       'tasks/task_second_brain.md': page('task_second_brain', front='multi_session: true\nsessions:\n  - id: a\n    prompt: x\n'), 'tasks/task_bare.md': 'id: task_bare\nname: no front matter\n\n## Prompt\n\nx\n', 'tasks/task_XX_name.md': page('task_XX_name'),
                       'assets/pictures/a.jpg': b'\xff\xd8\xff\0', 'scripts/benchmark.py': 'pass\n'})

def qwenclawbench(root: Path):
    write_files(root, {'qwenclawbench.jsonl': '{"task_id": "task_00001"}\n', 'tasks/task_00001_next.md': page('task_00001_next', front='subcategory: lists\n'), 'assets/task_00001_next/notes/todo.txt': 'x buy milk\ncall Ada\n', 'assets/task_00001_next/data.bin': b'\0\1'})

# ---- Claw-Eval

CLAW_EVAL = '''task_id: {name}
task_name: Refund
version: "1.0"
category: finance
difficulty: easy
services:
  - {{name: crm, command: python mock_services/crm/server.py, port: 9110, health_check: "http://localhost:9110/crm/health"}}
prompt:
  text: |
    Read /workspace/fixtures/orders.csv and tell me what the refunds of orders 7 and 8 are.
  language: en
tools:
  - {{name: crm_get, description: one customer, input_schema: {{type: object}}}}
tool_endpoints: [{{tool_name: crm_get, url: "http://localhost:9110/crm/get", method: POST}}]
sandbox_files: [fixtures/orders.csv, fixtures/scan.png]
scoring_components:
  - {{name: amounts, weight: 0.5, check: {{type: keywords_present, keywords: ["19.90", 25]}}}}
  - {{name: order, weight: 0.25, check: {{type: keywords_present, keywords: [order 7]}}}}
  - {{name: manner, weight: 0.25, check: {{type: llm_judge, description: Polite.}}}}
  - {{name: looked, weight: 0.2, check: {{type: tool_called, tool_name: crm_get, min_calls: 1}}}}
safety_checks: [{{type: tool_not_called, tool_name: crm_delete}}]
judge_rubric: Judge the manner.
reference_solution: look the orders up
environment: {{timeout_seconds: 300, max_turns: 20}}
'''
def claweval(root: Path):
    name = 'T01en_refund'
    write_files(root/'tasks'/name, {'task.yaml': CLAW_EVAL.format(name=name), 'grader.py': 'class G: pass\n', 'fixtures/orders.csv': 'order,paid\n7,19.90\n8,25\n', 'fixtures/scan.png': b'\x89PNG\0'})
    write_files(root/'tasks'/'T02zh_only_grader', {'task.yaml': 'task_id: T02zh_only_grader\nprompt: {text: Do it., language: zh}\nscoring_components: []\n', 'grader.py': 'class G: pass\n'})

# ---- tables

def officeqa(root: Path):
    write_files(root, {'officeqa_pro.csv': 'uid,question,answer,source_docs,source_files,difficulty\nUID0001,"What were the receipts of 1941, in millions?","7,103",https://example.org/january-1941,treasury_bulletin_1941_01.txt,hard\nUID0002,In which month was it highest?,March 1977,https://example.org/a,"treasury_bulletin_1977_04.txt\ntreasury_bulletin_1941_01.txt",easy\n',
                       'officeqa_full.csv': 'uid,question,answer,source_docs,source_files,difficulty\nUID0001,"What were the receipts of 1941, in millions?","7,103",https://example.org/january-1941,treasury_bulletin_1941_01.txt,hard\nUID0003,Which fund?,Federal Old-Age and Survivors Insurance (OASI) Trust Fund,x,,easy\n', 'treasury_bulletins_parsed/transformed/treasury_bulletin_1941_01.txt': 'Receipts | 7,103\n'})

def mcp_atlas(root: Path):
    import csv, io
    f = io.StringIO(); w = csv.writer(f)
    w.writerow(['TASK', 'ENABLED_TOOLS', 'PROMPT', 'TRAJECTORY', 'GTFA_CLAIMS'])
    w.writerow(['5c6d7e8f9a', '["filesystem_read_file","calculator_calculate","ddg-search_search"]', 'Check the files on my pc; what is the average profit, and how much is the difference?', '[{"role": "assistant"}]', "['The average profit was $6,446.20.', \"The shop's difference was $340.40.\"]"])
    w.writerow(['6c6d7e8f9a', '[]', 'Who directed it?', '', '[{"claim": "It was directed by her.", "essential": "yes"}]'])
    w.writerow(['7c6d7e8f9a', '[]', 'Nothing to claim?', '', ''])
    write_files(root, {'services/mcp_eval/sample_tasks.csv': f.getvalue(), 'README.md': '# x\n'})

def jobbench(root: Path):
    rubric = {'rubrics': [{'rubric': 'Is the event rate 20.2%?', 'weight': 10, 'criterion': ['computes 236/1166', 'says 20.2%']}, {'rubric': 'Is the sample size recomputed?', 'weight': 5, 'criterion': ['shows the formula']}]}
    for d, extra in (('dataset/actuaries/task1', {'files_required_to_search/paper.pdf': b'%PDF\0'}), ('dataset_easy/actuaries/task1', {})):
        write_files(root/d, {'RUBRICS.json': json.dumps(rubric), 'task_card.md': '# Actuaries\n', 'task_folder/TASK_INSTRUCTIONS.txt': 'Compute the event rate of data.csv; write report.md.\n', 'task_folder/data.csv': 'a,b\r\n1,2\r\n', 'task_folder/book.xlsx': b'PK\3\4\0\xff', **extra})
    write_files(root/'dataset/lawyers/task2', {'task_folder/TASK_INSTRUCTIONS.txt': 'No rubric here.\n'})

ALL = {'clawgym': lambda d: clawgym(d, 5, 5), 'harbor': harbor, 'pinchbench': pinchbench, 'qwenclawbench': qwenclawbench, 'claweval': claweval, 'officeqa': officeqa, 'mcp-atlas': mcp_atlas, 'jobbench': jobbench}
