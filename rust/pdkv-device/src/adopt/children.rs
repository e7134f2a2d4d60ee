//! Living descendants that were forked, not executed, and so still share pages of a range.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::vma::parse_head;

/// The pid of a descendant that has the range mapped as this process has; one whose mappings can't be
/// read counts as sharing. Descendants that lost their parent are not seen.
pub(super) fn sharing(first: u64, last: u64) -> Option<u32> {
    let parents = parents();
    let our_program = fs::read_link("/proc/self/exe").ok();
    let us = std::process::id();
    parents
        .keys()
        .copied()
        .filter(|&pid| descends(&parents, pid, us))
        .find(|pid| {
            let folder = Path::new("/proc").join(pid.to_string());
            let program = fs::read_link(folder.join("exe")).ok();
            if program.is_some() && program != our_program {
                return false;
            }
            match fs::read_to_string(folder.join("maps")) {
                Ok(maps) => maps
                    .lines()
                    .filter_map(parse_head)
                    .any(|vma| vma.start < last && first < vma.end),
                Err(error) => error.kind() == ErrorKind::PermissionDenied,
            }
        })
}

/// Every visible process with its parent.
fn parents() -> BTreeMap<u32, u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return BTreeMap::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            Some((pid, parent(&stat)?))
        })
        .collect()
}

/// The parent in a stat line; the command before it may hold spaces and parentheses.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn descends(parents: &BTreeMap<u32, u32>, pid: u32, ancestor: u32) -> bool {
    let mut at = pid;
    // Bounded: the table was not read at one instant, so it may hold a cycle.
    for _ in 0..parents.len() {
        match parents.get(&at) {
            Some(&parent) if parent == ancestor => return true,
            Some(&parent) => at = parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_from_any_command_name() {
        assert_eq!(parent("12 (a) b) c) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (x"), None);
    }

    #[test]
    fn descent_is_followed_and_cycles_end() {
        let table = BTreeMap::from([(2, 1), (3, 2), (4, 3), (8, 9), (9, 8)]);
        assert!(descends(&table, 4, 1) && descends(&table, 4, 3) && !descends(&table, 1, 4));
        assert!(!descends(&table, 8, 1));
    }
}
