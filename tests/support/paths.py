"Where the project and its committed photos are"

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHOTOS = ROOT / 'data' / 'flickr8k-world'
