"""The floor plan: numbers are import order, arrows between wings run one way, rooms stay small."""
import ast, json, re
from importlib import metadata
from pathlib import Path
import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
WINGS = ['records', 'capture', 'launch', 'learn', 'study', 'cli']

def notebooks():
    for p in sorted((ROOT/'nbs').glob('*.ipynb')):
        cells = json.loads(p.read_text())['cells']
        code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
        module = next((m[1] for s in code if (m := re.search(r'^#\|\s*default_exp\s+(\S+)', s, re.M))), None)
        yield p, cells, code, module

ALL = list(notebooks())
ORDER = {m: i for i, (_, _, _, m) in enumerate(ALL)}

def imports(code):
    "Modules of clawlab that the cells import, as dotted names below `clawlab`."
    for s in code:
        s = '\n'.join(l for l in s.splitlines() if not l.lstrip().startswith(('%', '!')))
        for n in ast.walk(ast.parse(s, type_comments=False)):
            if isinstance(n, ast.ImportFrom) and n.module and n.module.split('.')[0] == 'clawlab':
                base = n.module.removeprefix('clawlab').lstrip('.')
                for a in n.names:
                    full = f'{base}.{a.name}'.lstrip('.')
                    yield full if full in ORDER else base
            elif isinstance(n, ast.Import):
                yield from (a.name.removeprefix('clawlab.') for a in n.names if a.name.startswith('clawlab.'))

def test_there_are_notebooks_and_each_exports_its_own_module():
    modules = [m for *_, m in ALL]
    assert len(modules) > 10 and None not in modules
    assert len(set(modules)) == len(modules)

@pytest.mark.parametrize('p,cells,code,module', ALL, ids=[p.stem for p, *_ in ALL])
def test_a_notebook_imports_only_lower_numbers(p, cells, code, module):
    for dep in imports(code):
        assert dep in ORDER, f'{p.name} imports clawlab.{dep}, which no notebook exports'
        assert ORDER[dep] < ORDER[module], f'{p.name} imports {dep}, which comes later'
        assert WINGS.index(dep.split('.')[0]) <= WINGS.index(module.split('.')[0])

@pytest.mark.parametrize('p,cells,code,module', ALL, ids=[p.stem for p, *_ in ALL])
def test_a_notebook_is_a_lesson_of_bounded_size(p, cells, code, module):
    exported = [s for s in code if re.search(r'^#\|\s*export', s, re.M)]
    lines = sum(len([l for l in s.splitlines() if l.strip() and not l.startswith('#|')]) for s in exported)
    assert len(cells) <= 120 and p.stat().st_size <= 200_000
    assert lines <= 420, f'{p.name} exports {lines} lines: split the room'
    first = next(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    assert re.match(r'# .+\n> ', first), f'{p.name} must open with a title and a one-line quote'

def test_no_path_of_a_machine_and_no_registry_in_the_tree():
    import subprocess
    files = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True).stdout.split()
    bad = re.compile(r'registry\.npmjs|files\.pythonhosted|pypi\.org/simple|deb\.debian\.org|(?<![\w}])/(?:root|work)/')
    hits = [f for f in files if f != 'tests/test_layout.py' and (ROOT/f).is_file() and bad.search((ROOT/f).read_text(errors='replace'))]
    assert not hits

def test_the_pinned_environment_is_one_for_the_oldest_python_that_is_promised():
    "Debian 12's own is 3.11.2: a pin that wanted 3.11.5 once ended `make study` in its first minute."
    pins = [l.partition('==')[0].partition('[')[0] for l in (ROOT/'requirements.txt').read_text().splitlines() if '==' in l and not l.startswith('#')]
    wants = {p: metadata.metadata(p)['Requires-Python'] for p in pins}
    assert len(pins) > 100 and not {p: w for p, w in wants.items() if w and not SpecifierSet(w).contains('3.11.2')}
