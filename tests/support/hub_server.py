"The part of the Hugging Face hub's HTTP interface that uploading and downloading a model repository use, in memory"

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = 'c' * 40


class Hub(BaseHTTPRequestHandler):
    "Repositories are `server.repos`: name -> {path -> bytes}; `server.asked` are the requests; when `down` it hangs up"

    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def answer(self, value=None, status=200, body=None, **headers):
        body = json.dumps(value).encode() if body is None else body
        self.send_response(status)
        for k, v in dict(headers, **{'Content-Length': str(len(body))}).items():
            self.send_header(k.replace('_', '-'), v)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def handle_any(self):
        if self.server.down:
            self.close_connection = True  # without an answer
            return None
        path = self.path.partition('?')[0]
        body = self.body()
        self.server.asked.append((self.command, path))
        repos = self.server.repos
        if path == '/api/repos/create':
            given = json.loads(body)
            name = f'{given["organization"]}/{given["name"]}' if given.get('organization') else given['name']
            repos.setdefault(name, {})
            return self.answer(dict(url=f'http://{self.headers["Host"]}/{name}', id=name))
        if path == '/api/validate-yaml':
            self.server.cards.append(json.loads(body)['content'])
            return self.answer(dict(errors=[], warnings=[]))
        if m := re.fullmatch(r'/api/models/(\w+/\w+)/preupload/main', path):
            files = [dict(f, uploadMode='lfs' if f['path'].endswith('.safetensors') else 'regular', shouldIgnore=False)
                     for f in json.loads(body)['files']]  # fmt: skip
            return self.answer(dict(files=files))
        if m := re.fullmatch(r'/(\w+/\w+)\.git/info/lfs/objects/batch', path):
            at = f'http://{self.headers["Host"]}/upload/'
            objects = [dict(o, actions=dict(upload=dict(href=at + o['oid']))) for o in json.loads(body)['objects']]
            return self.answer(dict(objects=objects, transfer='basic'))
        if m := re.fullmatch(r'/upload/(\w+)', path):
            self.server.large[m[1]] = body
            return self.answer({}) if hashlib.sha256(body).hexdigest() == m[1] else self.answer({}, 400)
        if m := re.fullmatch(r'/api/models/(\w+/\w+)/commit/main', path):
            for line in map(json.loads, body.splitlines()):
                value = line['value']
                if line['key'] == 'file':
                    repos[m[1]][value['path']] = base64.b64decode(value['content'])
                if line['key'] == 'lfsFile':
                    repos[m[1]][value['path']] = self.server.large[value['oid']]
            url = f'http://{self.headers["Host"]}/{m[1]}'
            return self.answer(dict(commitUrl=f'{url}/commit/{COMMIT}', commitOid=COMMIT, success=True))
        if m := re.fullmatch(r'/api/models/(\w+/\w+)(/revision/\w+)?', path):
            if m[1] not in repos:
                return self.answer(dict(error='Repository not found'), 404, X_Error_Code='RepoNotFound')
            return self.answer(dict(id=m[1], sha=COMMIT, siblings=[dict(rfilename=f) for f in repos[m[1]]]))
        if m := re.fullmatch(r'/api/models/(\w+/\w+)/tree/\w+', path):
            files = repos[m[1]].items()
            return self.answer(
                [dict(type='file', path=k, size=len(v), oid=hashlib.sha1(v).hexdigest()) for k, v in files]
            )
        if m := re.fullmatch(r'/(\w+/\w+)/resolve/\w+/(.+)', path):
            data = repos.get(m[1], {}).get(m[2])
            if data is None:
                return self.answer({}, 404, X_Error_Code='EntryNotFound')
            return self.answer(body=data, X_Repo_Commit=COMMIT, ETag=f'"{hashlib.sha256(data).hexdigest()}"')
        return self.answer({}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any


@contextmanager
def hub_server():
    "Serve an empty hub on this machine; its `url`, `repos` and `asked`"
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.repos = {}
    server.large = {}
    server.asked = []
    server.cards = []
    server.down = False
    server.url = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
