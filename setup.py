"""Packaging: everything comes from settings.ini, so that there is one place to change it

nbdev writes a pyproject.toml that declares these fields dynamic, hence each of them has to be set here.
"""

from configparser import ConfigParser
from pathlib import Path

import setuptools

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root / 'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

licenses = {'apache2': 'Apache-2.0'}
statuses = {'3': '3 - Alpha', '4': '4 - Beta', '5': '5 - Production/Stable'}
readme = root / 'README.md'

setuptools.setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(),
    author=cfg['author'],
    author_email=cfg['author_email'],
    license=licenses[cfg['license']],
    url=cfg['git_url'],
    project_urls={'Source': cfg['git_url'], 'Documentation': cfg['doc_host'] + cfg['doc_baseurl'] + '/'},
    classifiers=[
        f'Development Status :: {statuses[cfg["status"]]}',
        f'Intended Audience :: {cfg["audience"]}',
        'Intended Audience :: Science/Research',
        'Intended Audience :: Education',
        f'Natural Language :: {cfg["language"]}',
        'Programming Language :: Python :: 3',
        *[f'Programming Language :: Python :: {v}' for v in cfg['python_versions'].split()],
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Topic :: Scientific/Engineering :: Image Recognition',
    ],
    packages=setuptools.find_packages(include=[cfg['lib_path'], cfg['lib_path'] + '.*']),
    include_package_data=False,
    package_data={cfg['lib_path']: ['py.typed', 'reports/templates/*.j2', 'reports/*/*.json', 'reproduce/*/*.toml']},
    zip_safe=False,
    python_requires='>=' + cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require={
        **{k: cfg[f'{k}_requirements'].split() for k in ('bert', 'detection', 'hub', 'onnx', 'docs')},
        'dev': ' '.join(cfg[f'{k}_requirements'] for k in ('dev', 'bert', 'detection', 'onnx')).split(),
    },
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
