//! A look at the file of a library before the linker maps it: a pipe would hang it, a device feed it for ever,
//! and a file cut short end the process by SIGBUS.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// No libucp comes near this size.
const MAX_BYTES: u64 = 1 << 30;
const PROGRAM_HEADERS: usize = 4096;

/// Says what is wrong with a named file; a bare name is for the linker to find.
pub(crate) fn refuse(path: &Path) -> Result<(), String> {
    if path.components().count() < 2 {
        return Ok(());
    }
    let facts = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if facts.is_dir() {
        return Err("no libucp in this folder".to_owned());
    }
    if !facts.is_file() || facts.len() > MAX_BYTES {
        return Err("it is no file of a library".to_owned());
    }
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    match loaded_bytes(&mut file) {
        None => Err("it is no shared object of this machine".to_owned()),
        Some(needed) if needed > facts.len() => Err(format!(
            "it is cut short: `{}` bytes of at least `{needed}`",
            facts.len()
        )),
        Some(_) => Ok(()),
    }
}

/// What a regular file of a bearable size holds.
pub(crate) fn read(path: &Path) -> Option<Vec<u8>> {
    let facts = std::fs::metadata(path).ok()?;
    let plain = facts.is_file() && facts.len() <= MAX_BYTES;
    plain.then(|| std::fs::read(path).ok())?
}

/// How long an ELF file must be for all that the linker maps of it.
fn loaded_bytes(file: &mut File) -> Option<u64> {
    const LOAD: u32 = 1;
    let mut head = [0; 64];
    file.read_exact(&mut head).ok()?;
    let at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap_or_default());
    let short = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
    // 64 bits, little-endian: what this crate is built for.
    if head[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let (offset, size, count) = (at(32), short(54), short(56));
    if size < 56 || size * count > PROGRAM_HEADERS * 56 {
        return None;
    }
    let mut table = vec![0; size * count];
    file.seek(SeekFrom::Start(offset)).ok()?;
    // A table that isn't whole is a file that isn't whole.
    if file.read_exact(&mut table).is_err() {
        return Some(u64::MAX);
    }
    let field = |entry: &[u8], at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default());
    let ends = table
        .chunks_exact(size)
        .filter(|entry| entry[..4] == LOAD.to_le_bytes())
        .map(|entry| field(entry, 8).saturating_add(field(entry, 32)));
    ends.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_object_is_given_to_the_linker() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(refuse(&own), Ok(()));
        assert_eq!(refuse(Path::new("libucp.so.0")), Ok(()));
        assert!(refuse(Path::new("/dev/zero")).unwrap_err().contains("no file"));
        assert!(refuse(&std::env::temp_dir()).unwrap_err().contains("folder"));
        assert!(read(Path::new("/dev/zero")).is_none());
        let bytes = std::fs::read(&own).unwrap();
        let whole = loaded_bytes(&mut File::open(&own).unwrap()).unwrap() as usize;
        let cut = std::env::temp_dir().join(format!("pdkv-cut-{}", std::process::id()));
        for len in [0, 10, 63, 64, 100, 4096, whole - 1] {
            std::fs::write(&cut, &bytes[..len]).unwrap();
            let refused = refuse(&cut);
            assert!(refused.is_err(), "{len}: {refused:?}");
        }
        std::fs::remove_file(&cut).unwrap();
    }
}
