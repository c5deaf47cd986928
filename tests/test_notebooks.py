"""Every notebook runs twice: as written, and in module view (the exported module's names, the lessons only)."""
import json, os, re
from pathlib import Path
import pytest
from nbdev.test import test_nb as run_nb

NBS = Path(__file__).parent.parent/'nbs'
NOTEBOOKS = sorted(NBS.glob('*.ipynb'))
SKIP = ['slow', 'gpu', 'podman', 'k8s', 'net']

def run(path):
    "In this process; what a lesson sets in the environment is its own."
    before = dict(os.environ)
    try: ok, _ = run_nb(path, skip_flags=SKIP, basepath=str(NBS.parent))
    finally: os.environ.clear(); os.environ.update(before)
    assert ok, f'{path.name} failed; the traceback is above'

@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.stem)
def test_as_written(nb): run(nb)

@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.stem)
def test_module_view(nb, tmp_path):
    "What an importer gets: an exported function that uses an un-exported helper fails here."
    doc = json.loads(nb.read_text())
    cells, module = [], None
    for c in doc['cells']:
        src = ''.join(c['source'])
        if m := re.search(r'^#\|\s*default_exp\s+(\S+)', src, re.M): module = m[1]
        if c['cell_type'] == 'code' and re.search(r'^#\|\s*(export|exporti|default_exp)\b', src, re.M): continue
        cells.append(c)
    assert module, f'{nb.name} exports no module'
    load = f"import importlib; globals().update({{k: v for k, v in vars(importlib.import_module('clawlab.{module}')).items() if not k.startswith('__')}})"
    cells.insert(0, dict(cell_type='code', source=[load], metadata={}, outputs=[], execution_count=None, id='load'))
    copy = nb.parent/f'.module-view-{nb.name}'  # beside the original, so that relative paths mean the same
    copy.write_text(json.dumps({**doc, 'cells': cells}))
    try: run(copy)
    finally: copy.unlink()
