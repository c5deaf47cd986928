"Data of strangers: whatever lies in a folder of tasks, reading it ends soon, in one line, and takes in nothing but tasks."
import json, os, subprocess, sys
import pytest
from clawlab.records import InputError
from clawlab.launch.formats.convert import convert, load_any
from clawlab.launch.judge import read_answer
from clawlab.launch.tasks import load_suite

def gym(d, name='t1', **kw):
    for sub in ('input_files', 'reward'): (d/name/sub).mkdir(parents=True)
    (d/name/'data_entry.json').write_text(json.dumps(dict(task_id=name, user_query='Do the thing, please.', metadata={}) | kw))
    (d/name/'reward/reward.sh').write_text('echo 1'); (d/name/'input_files/a').write_text('x')

def page(d, front='', rubric='good', kind='llm_judge', id='t'):
    (d/'tasks').mkdir(); (d/'tasks/task_01_x.md').write_text(f'---\nid: {id}\ngrading_type: {kind}\n{front}---\n## Prompt\nDo it now.\n## LLM Judge Rubric\n{rubric}\n')

def claweval(d, **kw): (d/'tasks/t1').mkdir(parents=True); (d/'tasks/t1/task.yaml').write_text(json.dumps(dict(task_id='x', prompt=dict(text='Hello there.'), judge_rubric='good') | kw))
def rows(d, **kw): (d/'a.jsonl').write_text(json.dumps(kw) + '\n')

LOL = 'a0: &a0 [lol, lol]\n' + ''.join(f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"]*9)}]\n' for i in range(1, 12))   # 17 GB as text

REFUSED = {
    'a bomb of aliases': lambda d: page(d, LOL + 'extra: *a11\n'),
    'JSON as deep as the sea': lambda d: (gym(d), (d/'t1/data_entry.json').write_text('{"a":'*100_000)),
    'a table as deep': lambda d: (d/'x.jsonl').write_text('['*100_000),
    'a number of 6000 digits': lambda d: (gym(d), (d/'t1/data_entry.json').write_text('{"task_id": "t1", "user_query": "Do it.", "metadata": {"x": ' + '9'*6000 + '}}')),
    'half a character': lambda d: gym(d, user_query='x \ud800 y'),
    'a rule that is a number': lambda d: gym(d, metadata={'rule': 7}),
    'services that are numbers': lambda d: claweval(d, services=[1], tools=[2]),
    'an environment that is a list': lambda d: claweval(d, environment=[1]),
    'files that are a number': lambda d: claweval(d, sandbox_files=5),
    'a name that no file can have': lambda d: page(d, f'workspace_files: [{{source: {"a"*5000}, dest: y}}]\n'),
    'a file outside': lambda d: page(d, 'workspace_files: [{path: ../../x, content: y}]\n'),
    'claims that are a number': lambda d: rows(d, TASK=None, PROMPT=[1], GTFA_CLAIMS=5, ENABLED_TOOLS={'a': 1}),
    'sources that are a number': lambda d: rows(d, uid=[1], question=None, answer={'a': 1}, source_files=7),
    'files of a row that are a number': lambda d: rows(d, prompt=5, input_files=7, hook_code=[1]),
    'a pipe instead of a file': lambda d: (gym(d), (d/'t1/data_entry.json').unlink(), os.mkfifo(d/'t1/data_entry.json')),
}

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', REFUSED)
def test_what_is_no_task_is_refused_in_one_line(what, tmp_path):
    REFUSED[what](tmp_path)
    with pytest.raises(InputError) as e: load_any(tmp_path)
    assert '\n' not in str(e.value) and len(str(e.value)) < 900

def test_one_task_of_another_shape_leaves_the_others(tmp_path):
    gym(tmp_path, 't1', metadata={'rule': 7}); gym(tmp_path, 't2'); gym(tmp_path, 't3')
    (tmp_path/'t3/reward/check.py').write_text('x = ' + '-'*100_000 + '1')
    name, got = load_any(tmp_path)
    assert name == 'clawgym' and [t.task_id for t in got.tasks] == ['t2', 't3'] and 'not the shape' in got.refused['t1']

@pytest.mark.timeout(30)
def test_a_heading_of_blanks_takes_no_time(tmp_path):
    page(tmp_path, rubric='### ' + ' '*50_000 + 'x' + ' '*50_000 + '(\nfirst\n### Criterion 2: Tone (Weight: 30%)\nsecond')
    assert load_any(tmp_path)[1].tasks[0].rubric == {'x (': 'first', 'Tone': 'second'}

def test_a_table_that_is_small_on_the_disk_only_is_refused(tmp_path):
    pytest.importorskip('pyarrow.parquet')
    import numpy as np, pyarrow as pa, pyarrow.parquet as pq
    def column(text): return pa.DictionaryArray.from_arrays(pa.array(np.zeros(3_000_000, 'int32')), pa.array([text]))
    pq.write_table(pa.table(dict(TASK=column('t'), PROMPT=column('p'*1000), GTFA_CLAIMS=column('c'))), tmp_path/'a.parquet')
    assert (tmp_path/'a.parquet').stat().st_size < 1 << 20
    with pytest.raises(InputError, match='more than 200000 rows'): load_any(tmp_path, 'mcp-atlas')

@pytest.mark.parametrize('id, name', [('".."', 'task'), ('.', 'task'), ('漢'*100, '漢'*33), ('-rf', 'rf'), ('../../x', 'x')])
def test_a_name_is_a_folder_of_its_own_wherever_it_is_written(id, name, tmp_path):
    (tmp_path/'a').mkdir(); page(tmp_path/'a', id=id)
    t, = load_any(tmp_path/'a')[1].tasks
    assert t.task_id == name
    convert(tmp_path/'a', tmp_path/'b'/'c')
    assert sorted(os.listdir(tmp_path/'b')) == ['c'] and [*load_suite(tmp_path/'b/c')] == [name]

@pytest.mark.parametrize('id', ['..', '.', '.x', '漢'*100, 'a/b', ''])
def test_a_suite_has_no_such_names(id, tmp_path):
    (tmp_path/'verify.py').write_text('def verify(w, e): return 0.')
    (tmp_path/'train.jsonl').write_text(json.dumps(dict(task_id=id, family='f', instruction='x', files={}, steps=['true'])) + '\n')
    with pytest.raises(InputError, match='train.jsonl:1: task_id'): load_suite(tmp_path)

@pytest.mark.parametrize('source', ['def verify(w, e): return ' + '-'*100_000 + '1', 'def verify(w, e): return 1\n\0'])
def test_a_verifier_that_nobody_can_parse_is_one_line(source, tmp_path):
    (tmp_path/'verify.py').write_text(source); (tmp_path/'train.jsonl').write_text('{}\n')
    with pytest.raises(InputError, match='verify.py:1: '): load_suite(tmp_path)

def test_two_conversions_to_the_same_place_give_one(tmp_path):
    (src := tmp_path/'a').mkdir(); [gym(src, f't{k}') for k in range(20)]
    code = 'import sys; sys.stdin.read()\nfrom clawlab.records import InputError\nfrom clawlab.launch.formats.convert import convert\ntry: convert(*sys.argv[1:])\nexcept InputError as e: print(e)'
    ps = [subprocess.Popen([sys.executable, '-c', code, str(src), str(tmp_path/'same')], stdin=-1, stdout=-1, stderr=-1, text=True) for _ in range(4)]
    for p in ps: p.stdin.close(); p.stdin = None
    ends = [p.communicate(timeout=120) for p in ps]
    assert ('', '') in ends and all(out.count('\n') <= 1 and not err for out, err in ends), ends
    assert len(load_suite(tmp_path/'same')) == 20 and sorted(os.listdir(tmp_path)) == ['a', 'same']

def test_a_judges_score_counts_whatever_its_criterion_is_called():
    with pytest.raises(ValueError, match='99'): read_answer('{"scores": {"": 99}}', [''])
