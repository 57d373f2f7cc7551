"""The embedded corpus: English documentation that ships with Python, so that nothing has to be downloaded.

It consists of the language reference (`pydoc_data.topics`) and the docstrings of a fixed list of standard modules, read
from their source with `ast` without importing them. It has about 2 MB and differs slightly between Python versions, so
its hash is recorded.
"""

import ast
import hashlib
import inspect
import sysconfig
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = tuple(
    """
    __future__ _collections_abc _osx_support _pydecimal _pyio _strptime abc argparse ast
    asyncio.base_events asyncio.events asyncio.futures asyncio.locks asyncio.protocols asyncio.queues asyncio.runners
    asyncio.streams asyncio.subprocess asyncio.taskgroups asyncio.tasks asyncio.timeouts asyncio.transports
    asyncio.unix_events base64 bdb bisect bz2 calendar cmd code codecs codeop collections colorsys compileall
    concurrent.futures._base concurrent.futures.process concurrent.futures.thread configparser contextlib copy copyreg
    cProfile csv ctypes.util curses.textpad dataclasses datetime difflib dis doctest email._header_value_parser
    email._policybase email.charset email.feedparser email.generator email.header
    email.headerregistry email.message email.parser email.policy email.utils enum filecmp fileinput fnmatch fractions
    ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser
    http.client http.cookiejar http.cookies http.server imaplib importlib._bootstrap importlib._bootstrap_external
    importlib.abc importlib.metadata importlib.resources.abc importlib.util inspect io ipaddress json json.decoder
    json.encoder keyword linecache locale logging logging.config logging.handlers lzma mailbox mimetypes modulefinder
    multiprocessing.connection multiprocessing.context multiprocessing.managers multiprocessing.pool
    multiprocessing.queues multiprocessing.shared_memory multiprocessing.util netrc ntpath numbers opcode operator
    optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty
    py_compile pyclbr pydoc queue quopri random re._compiler re._parser reprlib rlcompleter runpy sched secrets
    selectors shelve shlex shutil signal site smtplib socket socketserver ssl stat statistics string
    stringprep subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit tkinter
    tkinter.dnd tkinter.filedialog tkinter.font tkinter.ttk token tokenize tomllib._parser trace traceback tracemalloc
    tty turtle types typing unittest.async_case unittest.case unittest.loader unittest.main unittest.mock
    unittest.result unittest.runner unittest.suite unittest.util urllib.error urllib.parse urllib.request
    urllib.response urllib.robotparser uuid venv warnings wave weakref webbrowser wsgiref.handlers wsgiref.headers
    wsgiref.simple_server wsgiref.util wsgiref.validate xml.dom.minidom xml.dom.pulldom
    xml.etree.ElementTree xml.sax.expatreader xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client
    xmlrpc.server zipapp zipfile zipimport zoneinfo._common
    """.split()
)


def embedded_documents() -> tuple[list[str], dict[str, list[str]]]:
    """Return the documents of the embedded corpus in a fixed order, and the `missing_modules` that this Python lacks.

    A document is one topic of the language reference, or all docstrings of one module, each after its qualified name.
    """
    from pydoc_data.topics import topics  # data only

    documents = [topics[name] for name in sorted(topics)]
    missing = []
    for name in MODULES:
        path = _source_of(name)
        text = _docstrings(path.read_text(encoding="utf-8"), name) if path is not None else ""
        if text:
            documents.append(text)
        else:
            missing.append(name)
    return documents, {"missing_modules": missing}


def embedded_fingerprint() -> str:
    """Return the sha256 of everything `embedded_documents` reads; much cheaper than parsing it."""
    from pydoc_data.topics import topics  # data only

    digest = hashlib.sha256(repr(sorted(topics.items())).encode())
    for name in MODULES:
        path = _source_of(name)
        digest.update(name.encode() + (path.read_bytes() if path is not None else b""))
    return digest.hexdigest()


def _source_of(module: str) -> Path | None:
    stem = STANDARD_LIBRARY.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _docstrings(source: str, module: str) -> str:
    """Return all docstrings of a module, dedented, each after the qualified name of its object on a separate line."""
    parts = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text and text.strip():
                parts.append(f"{name}\n\n{inspect.cleandoc(text)}")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{name}.{child.name}")
            elif not isinstance(child, ast.expr):
                visit(child, name)

    visit(ast.parse(source), module)
    return "\n\n".join(parts)
