//! What the kernel says about the mappings behind a range, and whether each could be moved.

use std::fs::File;
use std::io::{BufRead, BufReader};

use pdkv_core::{Error, ErrorKind, Result};

use super::OPERATION;

/// One mapping of this process, from `/proc/self/smaps`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Vma {
    pub(super) start: u64,
    pub(super) end: u64,
    permissions: String,
    inode: u64,
    name: String,
    kernel_page_kib: u64,
    flags: Vec<String>,
}

/// Flags of a mapping that make its pages more than plain memory, with what to say about them.
const REFUSED_FLAGS: &[(&str, &str)] = &[
    ("lo", "is locked in memory"),
    ("io", "is device memory"),
    ("pf", "is device memory"),
    ("mm", "mixes device and host pages"),
    ("ht", "lies in huge pages of a pool"),
    ("gd", "is a stack"),
    ("ss", "is a shadow stack"),
    ("um", "is watched by userfaultfd"),
    ("uw", "is watched by userfaultfd"),
    ("ui", "is watched by userfaultfd"),
    ("wf", "is wiped on fork"),
    ("sl", "is sealed"),
    (
        "dc",
        "is kept from fork children, as drivers do with memory registered for DMA",
    ),
];

impl Vma {
    /// Why this mapping can't be moved; `None` when it is plain private anonymous memory.
    pub(super) fn refusal(&self) -> Option<String> {
        let permissions = self.permissions.as_bytes();
        if permissions.get(3) != Some(&b'p') {
            return Some(format!("is mapped shared (`{}`)", self.what()));
        }
        if self.inode != 0 {
            return Some(format!("is a mapping of the file `{}`", self.name));
        }
        if !self.permissions.starts_with("rw") {
            return Some(format!("is not readable and writable (`{}`)", self.permissions));
        }
        if permissions.get(2) == Some(&b'x') {
            return Some("is executable".to_owned());
        }
        if !self.name.is_empty() && !self.name.starts_with("[anon") {
            return Some(format!("is `{}`, which the C library reuses in small parts", self.name));
        }
        if self.kernel_page_kib * 1024 > crate::os::page_bytes() {
            return Some("lies in huge pages of a pool".to_owned());
        }
        REFUSED_FLAGS
            .iter()
            .find(|(flag, _)| self.flags.iter().any(|has| has == flag))
            .map(|(_, reason)| (*reason).to_owned())
    }

    fn what(&self) -> &str {
        if self.name.is_empty() { "anonymous" } else { &self.name }
    }
}

/// The mappings that cover `start..end`, in order and without a gap.
pub(super) fn covering(start: u64, end: u64) -> Result<Vec<Vma>> {
    let unreadable = |error: std::io::Error| {
        Error::new(ErrorKind::Unsupported, OPERATION, "`/proc/self/smaps` is not readable").with_source(error)
    };
    let file = File::open("/proc/self/smaps").map_err(unreadable)?;
    let found = parse(BufReader::with_capacity(64 << 10, file), start, end).map_err(unreadable)?;
    let mut reached = start;
    for vma in &found {
        if vma.start > reached {
            break;
        }
        reached = vma.end;
    }
    if reached < end {
        return Err(Error::new(
            ErrorKind::Region,
            OPERATION,
            format!("nothing is mapped at `{reached:#x}`"),
        ));
    }
    Ok(found)
}

/// Reads smaps text up to the end of the range and keeps what overlaps it.
fn parse(text: impl BufRead, start: u64, end: u64) -> std::io::Result<Vec<Vma>> {
    let mut found: Vec<Vma> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let line = line?;
        if let Some(vma) = parse_head(&line) {
            if vma.start >= end {
                break;
            }
            inside = vma.end > start;
            if inside {
                found.push(vma);
            }
        } else if inside && let Some(vma) = found.last_mut() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                vma.flags = flags.split_whitespace().map(str::to_owned).collect();
            } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
                vma.kernel_page_kib = size.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
            }
        }
    }
    Ok(found)
}

/// Reads the head line of a mapping, as in `/proc/PID/maps`; `None` for any other line.
pub(super) fn parse_head(line: &str) -> Option<Vma> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let vma = Vma {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        permissions: words.next()?.to_owned(),
        inode: words.nth(2)?.parse().ok()?,
        name: words.collect::<Vec<_>>().join(" "),
        ..Vma::default()
    };
    Some(vma)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/some name
KernelPageSize:        4 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
Size:               1024 kB
KernelPageSize:        4 kB
VmFlags: rd wr mr mw me ac hg
7f0000100000-7f0000200000 rw-p 00000000 00:00 0 [anon:pool]
KernelPageSize:        4 kB
VmFlags: rd wr lo mr
7f0000300000-7f0000400000 rw-s 00000000 00:01 77 /memfd:x (deleted)
";

    #[test]
    fn overlapping_mappings_are_found_with_their_flags() {
        let found = parse(SMAPS.as_bytes(), 0x7f00_000f_f000, 0x7f00_0010_1000).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].refusal(), None);
        assert_eq!(found[1].refusal().unwrap(), "is locked in memory");
        assert!(
            parse(SMAPS.as_bytes(), 0x7f00_0020_0000, 0x7f00_0030_0000)
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn each_property_has_its_own_refusal() {
        let cases = [
            ("1000-2000 r-xp 0 08:02 9 /bin/x", "is a mapping of the file `/bin/x`"),
            (
                "1000-2000 rw-s 0 00:01 9 /memfd:x (deleted)",
                "is mapped shared (`/memfd:x (deleted)`)",
            ),
            ("1000-2000 r--p 0 00:00 0", "is not readable and writable (`r--p`)"),
            ("1000-2000 rwxp 0 00:00 0", "is executable"),
            (
                "1000-2000 rw-p 0 00:00 0 [heap]",
                "is `[heap]`, which the C library reuses in small parts",
            ),
            (
                "1000-2000 rw-p 0 00:00 0 [stack]",
                "is `[stack]`, which the C library reuses in small parts",
            ),
        ];
        for (line, reason) in cases {
            assert_eq!(parse_head(line).unwrap().refusal().as_deref(), Some(reason));
        }
        for (flag, reason) in REFUSED_FLAGS {
            let mut vma = parse_head("1000-2000 rw-p 0 00:00 0").unwrap();
            assert_eq!(vma.refusal(), None);
            vma.flags = vec![(*flag).to_owned()];
            assert_eq!(vma.refusal().as_deref(), Some(*reason));
        }
        let mut huge = parse_head("1000-2000 rw-p 0 00:00 0").unwrap();
        huge.kernel_page_kib = 2048;
        assert!(huge.refusal().is_some());
    }

    #[test]
    fn a_range_with_a_hole_names_the_hole() {
        let error = covering(0x1000, 0x3000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Region);
        assert!(error.message().contains("`0x1000`"), "{error}");
    }
}
