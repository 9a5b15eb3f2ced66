# What transformers says of SmolLM2-135M-Instruct (data/teacher, made by scripts/get_teacher.py) on the first 16 windows of
# 512 tokens of data/text/persuasion.txt: no BOS, each window alone, 511 predictions each, float32. Needs PyPI torch,
# transformers and tokenizers.
import json, math, os, sys
os.environ['HF_HUB_OFFLINE'] = '1'
import torch, transformers
from tokenizers import Tokenizer
root = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', '..')
folder = os.path.join(root, 'data', 'teacher', 'SmolLM2-135M-Instruct')
text = open(os.path.join(root, 'data', 'text', 'persuasion.txt'), encoding='utf-8').read()
ids = Tokenizer.from_file(os.path.join(folder, 'tokenizer.json')).encode(text, add_special_tokens=False).ids[:16 * 512]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
nll = []
with torch.no_grad():
    for window in torch.tensor(ids).view(16, 512):
        logits = model(window[None]).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits[:-1].double(), window[1:], reduction='sum').item())
out = {'model': 'SmolLM2-135M-Instruct', 'text': 'persuasion.txt', 'transformers': transformers.__version__,
       'torch': torch.__version__.split('+')[0], 'window': 512, 'window_nll': nll,
       'perplexity': math.exp(sum(nll) / (16 * 511)), 'ids': ids}
json.dump(out, open(os.path.join(root, 'tests', 'golden', 'smollm2_persuasion.json'), 'w'))
print(out['perplexity'], out['transformers'], file=sys.stderr)
