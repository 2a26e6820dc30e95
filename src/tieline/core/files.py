"""Files and folders that are complete or absent, and the cache folder.

A process killed at any moment leaves the old file or folder or the new one, and perhaps a hidden
`.NAME.*.partial`, which nothing reads and the next process that writes NAME removes. A process
holds a lock on the hidden names that it fills, so those of others that still run are left alone.

Whether something may be replaced is decided at the moment of the rename, by the rename itself: what
another process put there while this one worked raises `TakenError` and stays.
"""

import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import platformdirs

from tieline.core.errors import NoSpaceError, ParameterError, TielineError, require
from tieline.core.setting_fields import SettingError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked and no rest is removed
    fcntl = None

STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Names of open files: a rename would part them from whoever reads the other end."""

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_WORDS = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|os error (?:28|122|27)\b"
)
"""A disk, a quota, or the size of a file that the system allows (`ulimit -f`)."""

TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
BUSY = (errno.EWOULDBLOCK, errno.EACCES)
LONGEST_NAME = 200
"""Bytes of a name that a hidden name repeats; systems allow 255 in all."""

NO_REPLACE, EXCHANGE = 1, 2
"""Flags of Linux's renameat2."""


class TakenError(SettingError, OSError):
    """An output is there already, or another process made it meanwhile: it is left alone."""


def cache_folder(name: str = "") -> Path:
    """Return the folder `name` of the user's cache; on Linux below `$XDG_CACHE_HOME`."""
    return platformdirs.user_cache_path("tieline", appauthor=False) / name


def check_target(path: Path) -> None:
    """Raise if the file at `path` cannot be written."""
    require(not path.is_dir(), f"cannot write {path}: it is a folder")
    require(not path.is_socket(), f"cannot write {path}: it is a socket")
    if path.exists():
        require(os.access(path, os.W_OK), f"cannot write {path}: it is read-only")
    if _is_special(path):
        return
    target = _resolved_links(path)
    require(target.parent.is_dir(), f"cannot write {path}: there is no folder {target.parent}")
    writable = _is_writable_folder(target.parent, target)
    require(writable, f"cannot write {path}: {target.parent} is not writable")


def check_folder(path: Path) -> None:
    """Raise if no folder can be made or replaced at `path`; parents may be missing."""
    target = _resolved_links(path)
    existing = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
    require(existing.is_dir(), f"cannot write to {path}: {existing} is not a folder")
    inside = existing if existing != target else target.parent
    writable = _is_writable_folder(inside, target)
    require(writable, f"cannot write to {path}: {inside} is not writable")
    require(not target.is_mount(), f"cannot replace {path}: it is a mount point; name a new folder")


def _is_writable_folder(folder: Path, target: Path) -> bool:
    """Whether files can be created in a folder, found by creating one, as root always may by mode.

    Creates an unnamed file or, where there are none, a folder that `remove_leftovers` would remove.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE))
    except (OSError, AttributeError):
        probe = folder / _new_hidden_name(target)
        try:
            probe.mkdir()
        except OSError as problem:
            return problem.errno in DISK_FULL_ERRORS
        probe.rmdir()
    return True


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a model of transformers."""
    return (folder / "config.json").is_file()


def would_overwrite(output: Path, given: Path) -> bool:
    """Whether writing `output` would replace the file or folder `given`, or a file in it."""
    out, source = _resolved_links(output), _resolved_links(given)
    with suppress(OSError):
        if os.path.samefile(out, source):
            return True
    return out == source or out in source.parents


def write_whole(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write `data` to the file at `path` in one step.

    A symbolic link stays and its target is replaced; devices and pipes are written to directly. A
    file that is replaced keeps its mode and, where the system allows it, its owner.

    Args:
        path: the file to make.
        data: its contents.
        replace: whether a file that is there may be replaced; else `TakenError` is raised.
    """
    with naming_full_disk(path):
        if _is_special(path):
            with path.open("ab") as stream:
                stream.write(data)
            return
        target = _resolved_links(path)
        remove_leftovers(target)
        with _hidden_sibling(target, partial(Path.touch, exist_ok=False)) as half:
            try:
                _copy_mode_and_owner(target, half)  # before anybody can read what it says
                with half.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                _place_file(half, target, path, replace)
            finally:
                half.unlink(missing_ok=True)


@contextmanager
def whole_folder(
    path: Path, *, replace: bool = False, kind: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield a hidden folder to fill, which becomes `path` unless the block raises.

    Its files follow the umask, whatever mode a library gave them.

    Args:
        path: the folder to make; its parents are made, a symbolic link stays.
        replace: whether a folder that is not empty may be replaced; else `TakenError` is raised
            after the block, also for one that was made meanwhile.
        kind: whether a folder is of the kind that may be replaced; by default every one is.
    """
    target = _resolved_links(path)

    def may_be_replaced(folder: Path) -> bool:
        return replace and folder.is_dir() and (kind is None or kind(folder))

    with naming_full_disk(path), _temporary_parents(target):
        remove_leftovers(target)
        with _hidden_sibling(target, Path.mkdir) as half:
            try:
                yield half
                follow_umask(half)
                for inner in (*half.rglob("*"), half):
                    _sync_to_disk(inner)
                _place_folder(half, target, path, may_be_replaced)
            finally:
                shutil.rmtree(half, ignore_errors=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder, made with its parents if missing, while the block runs.

    Raises `ParameterError` if another process holds it. A folder that is still empty when the block
    raises is removed if it was made here.
    """
    target = _resolved_links(folder)
    with _temporary_parents(target / "any"):
        handle = os.open(target, os.O_RDONLY) if fcntl is not None else None
        try:
            if handle is not None and not _try_lock(handle, unless=BUSY):
                raise ParameterError(
                    f"another process writes to {folder}: wait until it ends, or choose another "
                    "folder"
                )
            yield
        finally:
            if handle is not None:
                os.close(handle)


@contextmanager
def locked_file(path: Path) -> Iterator[int]:
    """Yield the handle of a file to read and write, made if missing, while no other process may.

    Waits for other processes that use this function.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait_for_lock(handle)
        yield handle
    finally:
        os.close(handle)


def follow_umask(folder: Path) -> None:
    """Give the files in a new folder the mode that the umask leaves of 0666.

    Libraries that write under a temporary name leave 0600. Files with another name elsewhere, and
    links, are left as they are.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666  # the folder was made under the umask
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            path.chmod(mode)


def remove_leftovers(path: Path) -> None:
    """Remove the hidden files and folders that killed processes left beside `path`.

    A folder that was moved aside comes back if nothing took its place.
    """
    target = _resolved_links(path)
    ours = re.compile(
        rf"\.{re.escape(_hidden_name_stem(target))}\.[0-9a-f]{{16}}(?:\.old)?\.partial"
    )
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    for rest in map(target.with_name, filter(ours.fullmatch, names)):
        with suppress(OSError), _abandoned_leftover(rest) as alone:
            if not alone:
                continue
            if rest.name.endswith(".old.partial") and not target.exists():
                rest.rename(target)
            elif rest.is_dir():
                shutil.rmtree(rest, ignore_errors=True)
            else:
                rest.unlink()


def out_of_space(problem: BaseException) -> bool:
    """Whether an exception, or one that it came from, says that a disk is full.

    Libraries that write by other means than Python's raise classes of their own, with the words of
    the operating system.
    """
    visited: set[int] = set()
    cause: BaseException | None = problem
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRORS:
            return True
        quoting = isinstance(cause, TielineError)  # ours may name a file of any name
        if isinstance(cause, NoSpaceError) or (not quoting and FULL_WORDS.search(str(cause))):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raise `NoSpaceError` with the name of an output if its disk is full."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, NoSpaceError) or not out_of_space(problem):
            raise
        raise NoSpaceError(f"no space left on the disk of {path}: it was not written") from problem


KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_kind_text(path: Path) -> str:
    """Return what stands at a path, as words for messages: "a file", "a named pipe", ..."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode), "no regular file")
    except OSError:
        return "missing"


def require_file(path: Path, error: type[TielineError] = TielineError) -> None:
    """Refuse a path at which no regular file is: a pipe or a device would be waited for."""
    kind = file_kind_text(path)
    require(kind != "missing", f"{path}: no such file", error)
    require(kind == "a file", f"{path}: is {kind}, where a file is needed", error)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _resolved_links(path: Path) -> Path:
    """The place itself, through all symbolic links."""
    target = Path(os.path.realpath(path))
    require(not target.is_symlink(), f"cannot write {path}: its link leads nowhere")
    return target


def is_open_file(path: Path) -> bool:
    """Return whether a path names a file that is open already, such as /dev/fd/3."""
    return str(path.absolute()).startswith(STREAMS)


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder, or that is open already."""
    if is_open_file(path) and path.parent.is_dir():
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _copy_mode_and_owner(old: Path, new: Path) -> None:
    """Give the new file or folder the mode and owner of the one that it replaces, if any."""
    if not old.exists():
        return
    status = old.stat()
    if hasattr(os, "chown"):
        with suppress(OSError):
            os.chown(new, status.st_uid, status.st_gid)
    new.chmod(stat.S_IMODE(status.st_mode))  # after the owner, whose change takes bits away


@contextmanager
def _temporary_parents(target: Path) -> Iterator[None]:
    """Make the parents of a path; those that are empty are removed again if the block raises."""
    new = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in new:
            with suppress(OSError):
                parent.rmdir()
        raise


def _taken_error(path: Path) -> TakenError:
    """The error for an output that another process made meanwhile."""
    return TakenError(
        "{path} {state}: another process wrote it meanwhile, and it is left alone; choose another "
        "name or add {overwrite}",
        path=path,
        state="is not empty" if path.is_dir() else "exists",
    )


def _place_file(half: Path, target: Path, path: Path, replace: bool) -> None:
    """Rename a complete file; `path` is what the user calls it."""
    try:
        if replace:
            half.replace(target)
        else:
            _rename_new(half, target)
    except OSError as problem:
        if problem.errno not in TAKEN:
            raise
        raise _taken_error(path) from problem


def _rename_new(half: Path, target: Path) -> None:
    """Rename a file, unless the new name is taken: `FileExistsError`."""
    try:
        _renameat2(half, target, NO_REPLACE)
    except OSError as problem:
        if problem.errno == errno.EEXIST:
            raise
        try:
            os.link(half, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without links: the best that it can do
            if os.path.lexists(target):
                raise FileExistsError(
                    errno.EEXIST, os.strerror(errno.EEXIST), str(target)
                ) from None
            half.rename(target)


def _place_folder(
    half: Path, target: Path, path: Path, replaceable: Callable[[Path], bool]
) -> None:
    """Rename a complete folder; `path` is what the user calls it."""
    if target.is_dir():
        _copy_mode_and_owner(target, half)
    try:
        half.rename(target)  # replaces an empty folder, refuses any other
    except OSError as problem:
        if problem.errno not in TAKEN:
            raise
        if not replaceable(target) or not _exchange_replaceable(half, target, replaceable):
            raise _taken_error(path) from problem
    _sync_to_disk(target.parent)


def _exchange_replaceable(half: Path, target: Path, replaceable: Callable[[Path], bool]) -> bool:
    """Exchange two folders, and back if the old one turns out to be none that may be replaced."""
    if not _exchange_folders(half, target):
        return _replaced_in_two_steps(half, target, replaceable)
    if replaceable(half):
        return True
    _exchange_folders(half, target)
    return False


def _exchange_folders(half: Path, target: Path) -> bool:
    """Exchange two folders in one step, where the system can: no moment without either."""
    try:
        _renameat2(half, target, EXCHANGE)
    except OSError:
        return False
    return True


def _renameat2(source: Path, target: Path, flag: int) -> None:
    """Rename as Linux can: without replacing, or as an exchange; `OSError` elsewhere."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError) as problem:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from problem
    working_folder = -100
    if rename(working_folder, os.fsencode(source), working_folder, os.fsencode(target), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def _replaced_in_two_steps(half: Path, target: Path, replaceable: Callable[[Path], bool]) -> bool:
    """Replace a folder in two steps; one killed between them leaves the old one to come back."""
    old = half.with_suffix(".old.partial")
    target.rename(old)
    if not replaceable(old):
        old.rename(target)
        return False
    try:
        half.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return True


def _hidden_name_stem(target: Path) -> str:
    """The part of a hidden name that repeats the target, hashed if too long."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= LONGEST_NAME else hashlib.sha256(name).hexdigest()


def _new_hidden_name(target: Path) -> str:
    """A new name for what becomes `target` once it is complete."""
    return f".{_hidden_name_stem(target)}.{secrets.token_hex(8)}.partial"


@contextmanager
def _hidden_sibling(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A new hidden name beside `target`, made and locked while the block runs."""
    while True:
        half = target.with_name(_new_hidden_name(target))
        make(half)
        if fcntl is None:
            yield half
            return
        # another process may take it for a rest and remove it before it is locked
        with suppress(FileNotFoundError):
            handle = os.open(half, os.O_RDONLY)
            try:
                _wait_for_lock(handle)
                if half.exists() and os.path.samestat(half.stat(), os.fstat(handle)):
                    yield half
                    return
            finally:
                os.close(handle)


def _wait_for_lock(handle: int) -> None:
    """Hold an open file or folder as soon as others let go of it, where there are locks."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def _try_lock(handle: int, unless: Collection[int] = ()) -> bool:
    """Hold an open file or folder until it is closed or the process ends; whether that is so.

    Args:
        handle: the open file or folder.
        unless: errors that mean that it is not held; by default all do.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return bool(unless) and problem.errno not in unless
    return True


@contextmanager
def _abandoned_leftover(rest: Path) -> Iterator[bool]:
    """Yield whether a hidden file or folder belongs to no running process; locks it meanwhile.

    A process that has just made it waits until the block ends, and then finds it gone.
    """
    kind = rest.lstat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        yield False
        return
    handle = os.open(rest, os.O_RDONLY)
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def _sync_to_disk(path: Path) -> None:
    """Make a file, or the names in a folder, last through a power cut where the system can."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
