"""mini-swe-agent's own HTTP model class (the one for OpenRouter, which speaks the same protocol) at another address."""
import os
from minisweagent.models.openrouter_model import OpenRouterModel


class FastModel(OpenRouterModel):
    def __init__(self, **kw):
        super().__init__(**kw)
        self._api_url, self._api_key = os.environ['OPENAI_API_BASE'] + '/chat/completions', os.environ['OPENAI_API_KEY']
