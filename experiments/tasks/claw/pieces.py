"""Small functions with one plausible fault each, for the families of claw that repair and write programs.

A faulty version is the right one with `bad` in place of `good`. `ask` are the questions that a hidden test asks; the
answers come from the right version. Each function is used in one split only.
"""

class Piece:
    "One function: its module, what it should do, its right and its faulty source, and questions about it."
    def __init__(self, name, says, source, good, bad, *ask):
        self.name, self.says, self.source, self.ask = name, says, source.strip('\n') + '\n', ask
        assert good != bad and source.count(good) == 1, name
        self.faulty, self.good, self.bad = self.source.replace(good, bad), good, bad

PIECES = [
    Piece('slug', 'lower case, every run of other characters becomes one dash, no dash at either end', '''
import re

def slug(text):
    return re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')
''', ".strip('-')", '', "slug('Hello World')", "slug('  Hello, World!  ')", "slug('--a--b--')", "slug('')", "slug('R2 D2')"),
    Piece('chunks', 'lists of n items each, the last one shorter where they do not come out even', '''
def chunks(items, n):
    out = []
    for i in range(0, len(items), n):
        out.append(items[i:i + n])
    return out
''', 'range(0, len(items), n)', 'range(0, len(items) - n + 1, n)', "chunks([1, 2, 3, 4], 2)", "chunks([1, 2, 3, 4, 5], 2)", "chunks([], 3)", "chunks([1], 3)", "chunks('abcdefg', 3)"),
    Piece('median', 'the middle value; of an even number of values the mean of the two in the middle', '''
def median(values):
    values = sorted(values)
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return (values[half - 1] + values[half]) / 2
''', '(values[half - 1] + values[half]) / 2', 'values[half]', "median([3, 1, 2])", "median([4, 1, 3, 2])", "median([7])", "median([1, 10])", "median([5, 5, 1, 1])"),
    Piece('roman', 'the Roman numeral of a number from 1 to 3999', '''
def roman(n):
    out = ''
    for value, letters in ((1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')):
        while n >= value:
            out += letters
            n -= value
    return out
''', "(9, 'IX'), (5, 'V'), (4, 'IV')", "(5, 'V')", "roman(3)", "roman(4)", "roman(9)", "roman(1994)", "roman(2026)", "roman(58)"),
    Piece('parse_size', 'the bytes in a text such as 10 KB: B, KB, MB and GB in any case, a K is 1024', '''
def parse_size(text):
    units = {'B': 1, 'KB': 1024, 'MB': 1024 ** 2, 'GB': 1024 ** 3}
    number, unit = text.split()
    return int(float(number) * units[unit.upper()])
''', 'units[unit.upper()]', 'units[unit]', "parse_size('10 KB')", "parse_size('1.5 MB')", "parse_size('10 kb')", "parse_size('2 Gb')", "parse_size('7 B')"),
    Piece('merge_spans', 'the spans [start, end] in order, those that overlap or touch made one', '''
def merge_spans(spans):
    out = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out
''', 'max(out[-1][1], end)', 'end', "merge_spans([[1, 3], [2, 5]])", "merge_spans([[1, 9], [2, 5]])", "merge_spans([[5, 6], [1, 2]])", "merge_spans([[1, 2], [2, 3]])", "merge_spans([[0, 8], [1, 2], [3, 4]])"),
    Piece('wrap_words', 'lines of at most `width` characters, words unbroken, as many words on each line as fit', '''
def wrap_words(text, width):
    lines, line = [], ''
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f'{line} {word}'.strip()
    return lines + [line] if line else lines
''', 'len(line) + 1 + len(word) > width', 'len(line) + len(word) > width', "wrap_words('a bc def', 4)", "wrap_words('one two three', 7)", "wrap_words('aa bb', 4)", "wrap_words('', 5)", "wrap_words('abc de f', 6)", "wrap_words('to be or not', 4)"),
    Piece('is_leap', 'whether a year is a leap year in the Gregorian calendar', '''
def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
''', ' and (year % 100 != 0 or year % 400 == 0)', '', "is_leap(2024)", "is_leap(2023)", "is_leap(1900)", "is_leap(2000)", "is_leap(2100)"),
    Piece('run_lengths', 'pairs [item, how often in a row]', '''
def run_lengths(items):
    out = []
    for x in items:
        if out and out[-1][0] == x:
            out[-1][1] += 1
        else:
            out.append([x, 1])
    return out
''', 'if out and out[-1][0] == x:', 'if x in [y for y, _ in out]:', "run_lengths('aabbb')", "run_lengths('aabaa')", "run_lengths('')", "run_lengths([1, 2, 1])", "run_lengths('abab')"),
    Piece('find_sorted', 'the place of a value in a sorted list, -1 where it is not there', '''
def find_sorted(values, x):
    low, high = 0, len(values)
    while low < high:
        mid = (low + high) // 2
        if values[mid] < x:
            low = mid + 1
        else:
            high = mid
    return low if low < len(values) and values[low] == x else -1
''', 'high = mid\n', 'high = mid - 1\n', "find_sorted([1, 3, 5], 3)", "find_sorted([1, 3, 5], 5)", "find_sorted([], 1)", "find_sorted([2], 2)", "find_sorted([1, 3, 5, 7], 8)", "find_sorted([1, 2, 3, 4], 4)", "find_sorted([2, 4, 6], 2)", "find_sorted([1, 2, 3], 2)"),
    Piece('moving_mean', 'the mean of each window of k values that follow one another', '''
def moving_mean(values, k):
    return [sum(values[i:i + k]) / k for i in range(len(values) - k + 1)]
''', 'len(values) - k + 1', 'len(values) - k', "moving_mean([1, 2, 3, 4], 2)", "moving_mean([5, 5], 2)", "moving_mean([1], 2)", "moving_mean([3, 6, 9], 3)", "moving_mean([1, 2], 1)"),
    Piece('query_fields', 'a dict from name to the list of its values, in a text such as a=1&b=2&a=3', '''
def query_fields(text):
    out = {}
    for part in text.split('&'):
        if '=' in part:
            name, value = part.split('=', 1)
            out.setdefault(name, []).append(value)
    return out
''', 'out.setdefault(name, []).append(value)', 'out[name] = [value]', "query_fields('a=1&b=2')", "query_fields('a=1&a=2')", "query_fields('')", "query_fields('x=1=2&y')", "query_fields('k=1&j=0&k=3&k=2')"),
    Piece('luhn_ok', 'whether the digits pass the Luhn check: from the right, every second digit doubled (minus 9 above 9), the sum a multiple of 10', '''
def luhn_ok(digits):
    total = 0
    for i, c in enumerate(reversed(digits)):
        d = int(c)
        if i % 2 == 1:
            d = d * 2 - 9 if d > 4 else d * 2
        total += d
    return total % 10 == 0
''', 'enumerate(reversed(digits))', 'enumerate(digits)', "luhn_ok('79927398713')", "luhn_ok('79927398710')", "luhn_ok('4539578763621486')", "luhn_ok('18')", "luhn_ok('0000')", "luhn_ok('6011000990139424')"),
    Piece('unique', 'the items without repetitions, in the order in which they first occur', '''
def unique(items):
    seen, out = set(), []
    for x in items:
        if x not in seen:
            seen.add(x)
            out.append(x)
    return out
''', 'return out', 'return sorted(out)', "unique([3, 1, 3, 2])", "unique([1, 2, 3])", "unique('banana')", "unique([])", "unique([2, 2, 1])"),
    Piece('duration', 'hours, minutes and seconds as 1h 02m 03s; without the hours below one hour', '''
def duration(seconds):
    minutes, s = divmod(seconds, 60)
    h, m = divmod(minutes, 60)
    return f'{h}h {m:02}m {s:02}s' if h else f'{m}m {s:02}s'
''', "f'{h}h {m:02}m {s:02}s' if h else", "f'{h}h {m}m {s}s' if h else", "duration(59)", "duration(3723)", "duration(3600)", "duration(754)", "duration(36610)"),
    Piece('top_words', 'the n most frequent words, in lower case; equally frequent ones in alphabetical order', '''
def top_words(text, n):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda w: (-counts[w], w))[:n]
''', '(-counts[w], w)', '-counts[w]', "top_words('b a b', 2)", "top_words('pear fig apple', 2)", "top_words('x X y', 1)", "top_words('', 3)", "top_words('d c b a d c', 3)"),
    Piece('rotate', 'the list turned to the right by k places, also for a k larger than the list', '''
def rotate(items, k):
    if not items:
        return []
    k = k % len(items)
    return items[-k:] + items[:-k] if k else list(items)
''', 'k = k % len(items)', 'k = min(k, len(items))', "rotate([1, 2, 3], 1)", "rotate([1, 2, 3], 4)", "rotate([], 2)", "rotate([1, 2, 3], 3)", "rotate([1, 2, 3, 4], 6)"),
    Piece('caesar', 'letters moved by k in the alphabet, capitals stay capitals, everything else stays', '''
def caesar(text, k):
    out = ''
    for c in text:
        if c.isalpha():
            base = ord('A') if c.isupper() else ord('a')
            c = chr((ord(c) - base + k) % 26 + base)
        out += c
    return out
''', "ord('A') if c.isupper() else ord('a')", "ord('a')", "caesar('abc', 1)", "caesar('Abc', 1)", "caesar('xyz!', 3)", "caesar('HELLO', 5)", "caesar('a-Z', 1)"),
    Piece('flatten', 'one list of all items of lists in lists, however deep; texts stay whole', '''
def flatten(items):
    out = []
    for x in items:
        if isinstance(x, list):
            out += flatten(x)
        else:
            out.append(x)
    return out
''', 'out += flatten(x)', 'out += x', "flatten([1, [2, 3]])", "flatten([1, [2, [3, [4]]]])", "flatten(['ab', ['cd']])", "flatten([])", "flatten([[[]], [[5]]])"),
    Piece('version_key', 'what versions such as 1.10.2 are sorted by: a list of their numbers', '''
def version_key(text):
    return [int(part) for part in text.split('.')]
''', 'int(part)', 'part', "sorted(['1.10', '1.9', '1.2'], key=version_key)", "version_key('2.0')", "sorted(['3', '20', '1'], key=version_key)", "version_key('1.10.2')"),
    Piece('human_list', 'a, b and c', '''
def human_list(items):
    if len(items) < 2:
        return ''.join(items)
    return ', '.join(items[:-1]) + ' and ' + items[-1]
''', "    if len(items) < 2:\n        return ''.join(items)\n", '', "human_list(['a', 'b', 'c'])", "human_list(['a'])", "human_list([])", "human_list(['a', 'b'])"),
    Piece('snake', 'camelCase and PascalCase as snake_case; a run of capitals is one word (HTTPServer is http_server)', '''
import re

def snake(name):
    name = re.sub(r'([A-Z]+)([A-Z][a-z])', r'\\1_\\2', name)
    return re.sub(r'([a-z0-9])([A-Z])', r'\\1_\\2', name).lower()
''', "    name = re.sub(r'([A-Z]+)([A-Z][a-z])', r'\\1_\\2', name)\n", '', "snake('camelCase')", "snake('HTTPServer')", "snake('already_snake')", "snake('getHTTPResponseCode')", "snake('A')"),
    Piece('mask', 'the text with all but its last four characters as stars; short texts wholly as stars', '''
def mask(text):
    if len(text) <= 4:
        return '*' * len(text)
    return '*' * (len(text) - 4) + text[-4:]
''', "    if len(text) <= 4:\n        return '*' * len(text)\n", '', "mask('12345678')", "mask('1234')", "mask('')", "mask('abcde')", "mask('12')", "mask('a')"),
    Piece('digit_sum', 'the digits added up again and again until one digit is left', '''
def digit_sum(n):
    while n > 9:
        n = sum(map(int, str(n)))
    return n
''', 'while n > 9:', 'if n > 9:', "digit_sum(38)", "digit_sum(7)", "digit_sum(999999999999)", "digit_sum(10)", "digit_sum(0)"),
]

def answers(source, name, ask, module=None):
    "What a version says to the questions: [setup, expression, [`is` or `raises`, value]]."
    out = []
    for e in ask:
        exec(source, space := {})
        try: v = ['is', eval(e, space)]
        except Exception as x: v = ['raises', type(x).__name__]
        out.append([f'from {module or name} import {name}', e, v])
    return out
