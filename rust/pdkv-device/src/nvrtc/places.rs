//! Where an NVRTC may lie that the dynamic linker does not find by its name: in the wheels beside torch, beside other parts of CUDA
//! that the process has loaded, and where toolkits are installed. Only looks; loads nothing.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::NAMES;

/// Where wheels put it, below `site-packages`: those of CUDA 13 share a folder, those of CUDA 12 have one each.
const IN_WHEELS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];
/// Where a toolkit puts it, below its folder.
const IN_TOOLKITS: [&str; 2] = ["lib64", "targets/x86_64-linux/lib"];

/// The files that there are, most fitting first.
pub fn places() -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    found(&mapped(&maps), |name| std::env::var_os(name), Path::new("/usr/local"))
}

/// The files that a process has mapped, each once.
fn mapped(maps: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // Address, rights, offset, device, inode, and then the path, which may hold spaces.
        let path = line.splitn(6, ' ').nth(5).unwrap_or_default().trim_start();
        if path.starts_with('/') && files.last().is_none_or(|last| last.as_os_str() != path) {
            files.push(PathBuf::from(path));
        }
    }
    files.sort();
    files.dedup();
    files
}

fn found(mapped: &[PathBuf], variable: impl Fn(&str) -> Option<OsString>, local: &Path) -> Vec<PathBuf> {
    let is_nvrtc = |path: &&PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        NAMES.iter().any(|(_, known)| name.starts_with(known))
    };
    let mut files: Vec<PathBuf> = mapped.iter().filter(is_nvrtc).cloned().collect();
    let mut folders = Vec::new();
    for path in mapped {
        let packages = path.ancestors().find(|folder| {
            let name = folder.file_name().and_then(|name| name.to_str());
            matches!(name, Some("site-packages" | "dist-packages"))
        });
        folders.extend(
            packages
                .into_iter()
                .flat_map(|root| IN_WHEELS.map(|part| root.join(part))),
        );
    }
    // Beside libcudart or cuBLAS, whose folder is the toolkit's.
    folders.extend(mapped.iter().filter_map(|path| Some(path.parent()?.to_owned())));
    let toolkits = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(&variable)
        .map(PathBuf::from);
    for toolkit in toolkits.chain(installed(local)) {
        folders.extend(IN_TOOLKITS.map(|part| toolkit.join(part)));
    }
    folders.extend(variable("CONDA_PREFIX").map(|conda| PathBuf::from(conda).join("lib")));
    let mut seen = HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    files.extend(
        folders
            .iter()
            .flat_map(|folder| NAMES.map(|(_, name)| folder.join(name))),
    );
    let mut seen = HashSet::new();
    files.retain(|file| fs::canonicalize(file).is_ok_and(|file| seen.insert(file)));
    files
}

/// Toolkits below `/usr/local`: the one that is chosen there, then the others, newest first.
fn installed(local: &Path) -> Vec<PathBuf> {
    let mut versions: Vec<((u32, u32), PathBuf)> = fs::read_dir(local)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let (major, minor) = name.to_str()?.strip_prefix("cuda-")?.split_once('.')?;
            Some(((major.parse().ok()?, minor.parse().ok()?), entry.path()))
        })
        .collect();
    versions.sort();
    let others = versions.into_iter().rev().map(|(_, path)| path);
    std::iter::once(local.join("cuda")).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with empty files, removed with the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("pdkv-places-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            for file in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, b"").unwrap();
            }
            Self(fs::canonicalize(root).unwrap())
        }

        /// What is found by a process that has mapped these files.
        fn found(&self, mapped: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
            let mapped: Vec<_> = mapped.iter().map(|file| self.0.join(file)).collect();
            let variable = |name: &str| {
                let (_, folder) = variables.iter().find(|(known, _)| *known == name)?;
                Some(self.0.join(folder).into_os_string())
            };
            let files = found(&mapped, variable, &self.0.join("local"));
            let name = |path: PathBuf| path.strip_prefix(&self.0).unwrap().to_str().unwrap().to_owned();
            files.into_iter().map(name).collect()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_maps_of_a_process_are_read() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 42                         /opt/with space/libcudart.so.12\n\
                    7f01-7f02 rw-p 00001000 08:01 42                         /opt/with space/libcudart.so.12\n\
                    7f02-7f03 rw-p 00000000 00:00 0 \n\
                    7f03-7f04 rw-p 00000000 00:00 0                          [heap]\n\
                    7f04-7f05 r-xp 00000000 08:01 43                         /lib/x.so\n";
        let files = mapped(maps);
        assert_eq!(
            files,
            [
                PathBuf::from("/lib/x.so"),
                PathBuf::from("/opt/with space/libcudart.so.12")
            ]
        );
    }

    #[test]
    fn the_wheels_beside_anything_of_python_are_found() {
        let files = [
            "env/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "env/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "env/lib/python3.12/site-packages/numpy/core/x.so",
        ];
        let tree = Tree::new("wheels", &files);
        assert_eq!(tree.found(&[files[2]], &[]), [files[0], files[1]]);
        assert!(tree.found(&["elsewhere/x.so"], &[]).is_empty());
        // The one that the process has comes first, and none comes twice.
        assert_eq!(tree.found(&[files[2], files[1]], &[]), [files[1], files[0]]);
    }

    #[test]
    fn toolkits_are_found_newest_first_and_after_what_is_loaded() {
        let files = [
            "local/cuda-12.9/lib64/libnvrtc.so.12",
            "local/cuda-13.10/targets/x86_64-linux/lib/libnvrtc.so.13",
            "local/cuda-13.2/lib64/libnvrtc.so.13",
            "other/cuda/lib64/libnvrtc.so.12",
            "home/lib64/libnvrtc.so.12",
            "conda/lib/libnvrtc.so.13",
        ];
        let tree = Tree::new("toolkits", &files);
        let found = tree.found(
            &["other/cuda/lib64/libcudart.so.12"],
            &[("CUDA_HOME", "home"), ("CONDA_PREFIX", "conda")],
        );
        assert_eq!(found, [files[3], files[4], files[1], files[2], files[0], files[5]]);
    }
}
