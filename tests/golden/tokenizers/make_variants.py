# variants.json: ids and decoded text of many strings by the PyPI package `tokenizers`, for tokenizers that are gpt2.tokenizer.json
# with parts replaced (and one trained here, in the manner of Llama 2). Run in this folder: python make_variants.py
import json, os, tokenizers
from tokenizers import Tokenizer, models, trainers, normalizers, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
BASE = json.load(open(os.path.join(HERE, 'gpt2.tokenizer.json')))
N = len(BASE['model']['vocab'])

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = '|'.join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

def byte_level(use_regex=True, prefix=False):
    return {'type': 'ByteLevel', 'add_prefix_space': prefix, 'trim_offsets': True, 'use_regex': use_regex}
def split(pattern, behavior='Isolated', invert=False, kind='Regex'):
    return {'type': 'Split', 'pattern': {kind: pattern}, 'behavior': behavior, 'invert': invert}
def sequence(*steps): return {'type': 'Sequence', 'pretokenizers': list(steps)}
def token(content, id, **flags):
    t = dict(id=id, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    t.update(flags)
    return t
def template(before, after=()):
    piece = lambda t: {'SpecialToken': {'id': t, 'type_id': 0}}
    return {'type': 'TemplateProcessing', 'single': [*map(piece, before), {'Sequence': {'id': 'A', 'type_id': 0}}, *map(piece, after)],
            'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 1}}],
            'special_tokens': {t: {'id': t, 'ids': [BASE['model']['vocab'][t]], 'tokens': [t]} for t in {*before, *after}}}

ADDED = BASE['added_tokens'] + [
    token('<|user|>', N, special=True, rstrip=True), token('<|pad|>', N + 1, special=True, lstrip=True),
    token('<|both|>', N + 2, special=True, lstrip=True, rstrip=True), token('word', N + 3, single_word=True),
    token('ü', BASE['model']['vocab']['ü']), token('Việt', N + 4, normalized=True), token('日本', N + 5),
    token('<|us', N + 6), token('hello', N + 7, normalized=True, lstrip=True, rstrip=True, single_word=True)]
NEOX = BASE['added_tokens'] + [token(' ' * k, N + 24 - k, normalized=True) for k in range(24, 1, -1)]
NFC = {'type': 'NFC'}

def variants():
    yield 'qwen2', dict(normalizer=NFC, pre_tokenizer=sequence(split(QWEN2), byte_level(False)))
    yield 'llama3', dict(pre_tokenizer=sequence(split(LLAMA3), byte_level(False)), model=dict(ignore_merges=True),
                         post_processor={'type': 'Sequence', 'processors': [byte_level(False), template(['<|endoftext|>'])]})
    yield 'neox', dict(normalizer=NFC, added_tokens=NEOX)
    yield 'smollm', dict(pre_tokenizer=sequence({'type': 'Digits', 'individual_digits': True}, byte_level()))
    yield 'digits_contiguous', dict(pre_tokenizer=sequence({'type': 'Digits', 'individual_digits': False}, byte_level()))
    yield 'o200k', dict(pre_tokenizer=sequence(split(O200K), byte_level(False)))
    yield 'deepseek', dict(pre_tokenizer=sequence(split(r'[\r\n]'), split(r'\s?\p{L}+'), split(r'\s?\p{P}+'), split(r'[一-龥ࠀ-一가-퟿]+'),
                                                  split(DEEPSEEK), split(r'\p{N}'), byte_level(False)))
    yield 'prefix_space', dict(pre_tokenizer=byte_level(prefix=True))
    yield 'prefix_space_no_regex', dict(pre_tokenizer=byte_level(False, True))
    yield 'bytes_first', dict(pre_tokenizer=sequence(byte_level(), split('[0-9]{3}')))
    yield 'added', dict(added_tokens=ADDED, normalizer=NFC, post_processor=template(['<|im_start|>', '<|endoftext|>'], ['<|im_start|>']))
    yield 'nfd', dict(normalizer={'type': 'Sequence', 'normalizers': [{'type': 'NFD'}, {'type': 'Replace', 'pattern': {'Regex': r'\p{Mn}'}, 'content': ''}]})
    yield 'nfkc', dict(normalizer={'type': 'Sequence', 'normalizers': [{'type': 'NFKC'}, {'type': 'Replace', 'pattern': {'String': '..'}, 'content': '!'}]})
    for behavior in ['Isolated', 'Removed', 'MergedWithPrevious', 'MergedWithNext', 'Contiguous']:
        for invert in [False, True]:
            yield f'split_{behavior}_{invert}', dict(pre_tokenizer=sequence(split(r'\s|[[:punct:]]|\d', behavior, invert), byte_level(False)))
        yield f'split_string_{behavior}', dict(pre_tokenizer=sequence(split(' ', behavior, False, 'String'), byte_level(False)))
    yield 'empty_matches', dict(pre_tokenizer=sequence(split(r'\d*', 'MergedWithPrevious'), split(r'(?=[A-Z])|\b', 'Isolated'), byte_level(False)))
    yield 'ruby', dict(pre_tokenizer=sequence(split(r'(?i)THE|and(?-i)X|^.|.$|\h{4}|\bin\B|[\w&&]+\u3000?|(?m:\).)|\p{^Alpha}\p{Han}'.replace('&&', '')), byte_level(False)))
    yield 'no_pre_tokenizer', dict(pre_tokenizer=None, model=dict(unk_token='!'))
    yield 'no_pre_tokenizer_fuse', dict(pre_tokenizer=None, decoder=None, model=dict(unk_token='!', fuse_unk=True))
    yield 'one_piece', dict(pre_tokenizer=byte_level(False))

def merged(parts):
    t = {**BASE, **{k: v for k, v in parts.items() if k != 'model'}}
    t['model'] = {**BASE['model'], **parts.get('model', {})}
    return t

TEXT = ['It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.',
        'However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed',
        'in the minds of the surrounding families, that he is considered as the rightful property of some one or other of their daughters.',
        'café naïve Ünïcode 日本語 テスト 你好 世界 привет мир 12345 67890 don\'t we\'ll I\'m'] * 20

def llama2():
    t = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='never')  # only for training
    special = ['<unk>', '<s>', '</s>'] + ['<0x%02X>' % b for b in range(256)]
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    d = json.loads(t.to_str())
    d['pre_tokenizer'] = None
    d['added_tokens'] = d['added_tokens'][:3]
    ids = {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}}
    d['post_processor'] = {**template([]), 'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}], 'special_tokens': ids}
    d['decoder'] = {'type': 'Sequence', 'decoders': [{'type': 'Replace', 'pattern': {'String': '▁'}, 'content': ' '}, {'type': 'ByteFallback'},
                                                     {'type': 'Fuse'}, {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}]}
    d['model']['merges'] = [' '.join(m) for m in d['model']['merges']]
    return d

# As bytes: the last ones are no UTF-8, and `tokenizers` gets them as Python's "replace" makes them.
STRINGS = [s.encode() for s in json.load(open(os.path.join(HERE, 'expected.json')))['strings']] + [s.encode() for s in [
    'a  b', '\n\n \n', '1234567', "don't", 'Việt', 'Việt', '!\x85', '\x85\x85x', 'a\x85b', '\u3000', 'x\u3000y', '\u3000\u3000z', ' ' * 24, ' ' * 25,
    ' ' * 24 + 'x', 'x' + ' ' * 24, ' ' * 53 + 'x', '👩🏽‍🚀 👨‍👩‍👧', 'e\u0301 o\u0308\u0304', '\u0301x', 'x\u0301\u0301', '<|user|>Hello', '<|user|>  Hello', 'a  <|pad|>  b',
    'a <|both|>  <|both|> b', '<|user|> <|pad|>', '<|us er|>', '<|us', '<|use', 'word words word. sword word', 'éword', 'aüb ü', 'xViệty Việt', '日本語', '日 日本',
    '  hello  world hello_ hello', '<|endoftext|><|endoftext|>', ' <|endoftext|> ', '<|endoftext', "I'LL we'Re 'ſ 'S'T", 'HTMLParser camelCase ΑΒΓαβγ ǅ',
    '\u180e x', 'a\u180eb', '\u200b\u200b', '²³¹¼ Ⅷ ٣٤٥ १२३', '١٢٣٤', 'A1B22C333D4444E55555', '$3.50 + €4,20 = ¥7..', '((a))[[b]]{{c}}', 'the THE andx andX', '0afF\n)\n',
    'x\r\ny\r\n\r\nz', '\t\t\tx\t', ' \n \n ', 'end ', 'end  ', '\u2028\u2029', '\x0b\x0c\x1c\x1d', 'ﬀ ﬃ ｶﾞ ㌀', '..... ...', 'ÀÁÂ ÃÄÅ', '한글 한글', 'a\u0327\u0301 a\u0301\u0327',
    'नमस्ते', 'שָׁלוֹם', 'ก็', '🇫🇷🇩🇪🇫', '❤️ ❤', '#️⃣', 'Hi 😊 삼겹살', '𝒳𝒴 𐍈', '\U000e0001', '\U0010ffff', 'word' * 30, 'a' * 300, 'ab' * 200, '\u2003em\u2003', 'x\u00a0\u00a0y']] + [
    b'\x80', b'a\xffb', b'\xc3', b'\xe2\x82', b'\xf0\x9f\x98', b'\xf0\x9f\x98a', b'\xed\xa0\x80', b'\xed\xa0\xbd\xed\xb8\x80', b'\xc0\xaf', b'\xf4\x90\x80\x80', b'\xf8\x88\x80\x80\x80', b'\xe2\x28\xa1',
    b'ok \xf0\x9f\x98\x80\xf0\x9f', b'\xfe\xff']

def outcome(t):
    rows = {'ids': [], 'special': [], 'text': [], 'text_without_special': []}
    for s in STRINGS:
        s = s.decode('utf-8', 'replace')
        ids = t.encode(s, add_special_tokens=False).ids
        special = t.encode(s).ids
        rows['ids'].append(ids)
        rows['special'].append(special)
        rows['text'].append(t.decode(special, skip_special_tokens=False))
        rows['text_without_special'].append(t.decode(special, skip_special_tokens=True))
    rows['special'] = [s if s != i else None for s, i in zip(rows['special'], rows['ids'])]
    rows['text_without_special'] = [w if w != x else None for w, x in zip(rows['text_without_special'], rows['text'])]
    rows['text'] = [x if x != s.decode('utf-8', 'replace') else None for x, s in zip(rows['text'], STRINGS)]
    return rows

def main():
    out = {'made_with': 'tokenizers ' + tokenizers.__version__, 'strings': [s.hex() for s in STRINGS], 'variants': []}
    for name, parts in variants():
        out['variants'].append({'name': name, 'replace': parts, **outcome(Tokenizer.from_str(json.dumps(merged(parts))))})
    d = llama2()
    out['variants'].append({'name': 'llama2', 'tokenizer': d, **outcome(Tokenizer.from_str(json.dumps(d)))})
    with open(os.path.join(HERE, 'variants.json'), 'w') as f:
        f.write('{\n' + ',\n'.join(json.dumps(k) + ': ' + (json.dumps(v, separators=(',', ':')) if k != 'variants' else
                '[\n' + ',\n'.join(json.dumps(x, separators=(',', ':')) for x in v) + '\n]') for k, v in out.items()) + '\n}\n')

if __name__ == '__main__':
    main()
