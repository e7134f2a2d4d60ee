//! Where the kernels of a GPU come from: an image that is named, one of the wheel, one on disk, or the compiler. What each was good for
//! is a value, for messages and for `pdkv doctor`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::pages::Kernels;
use crate::kernels::{EMBEDDED, HEADERS, SOURCE, UNIT};
use crate::nvrtc::{Cache, Key, Nvrtc, OPTIONS, Target, Unit, places};

/// Names a ready-made image, which is loaded instead of any other.
const IMAGE_SETTING: &str = "PDKV_CUDA_IMAGE";

/// Where the image of loaded kernels came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The caller.
    Given,
    /// The file that `PDKV_CUDA_IMAGE` names.
    Named(PathBuf),
    /// Made when this package was built, for this architecture.
    Embedded(u32),
    /// Kept on disk by an earlier process.
    Kept(PathBuf),
    /// Made now.
    Compiled {
        /// The compiler's file.
        nvrtc: PathBuf,
        /// Its release.
        version: (u32, u32),
        /// Why the image is not kept for the next process, if it is not.
        not_kept: Option<String>,
    },
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Given => write!(f, "given by the caller"),
            Self::Named(path) => write!(f, "`{}`, which {IMAGE_SETTING} names", path.display()),
            Self::Embedded(arch) => write!(f, "the package's own for sm_{arch}"),
            Self::Kept(path) => write!(f, "kept in `{}`", path.display()),
            Self::Compiled {
                nvrtc,
                version: (major, minor),
                not_kept,
            } => {
                write!(f, "compiled by `{}` of CUDA {major}.{minor}", nvrtc.display())?;
                match not_kept {
                    Some(reason) => write!(f, ", not kept: {reason}"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// A place where kernels may come from, and what was found there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// `named`, `embedded`, `kept` or `compiler`.
    pub place: &'static str,
    /// What is there, or why nothing of use is.
    pub found: Result<String, String>,
}

/// Where to look.
#[derive(Clone, Debug)]
pub struct Sources {
    /// An image that is loaded instead of any other.
    pub named: Option<PathBuf>,
    /// Images with their architectures.
    pub embedded: &'static [(u32, &'static [u8])],
    /// The folder of images made earlier, or why there is none.
    pub cache: Result<Cache, String>,
    /// Files that may be an NVRTC. Those that the dynamic linker knows by name come after them.
    pub compilers: Vec<PathBuf>,
}

impl Sources {
    /// Where this process and its environment say. Looks at files, loads nothing.
    pub fn of_process() -> Self {
        let set = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        Self {
            named: set(IMAGE_SETTING),
            embedded: EMBEDDED,
            cache: folder(set("XDG_CACHE_HOME"), set("HOME"))
                .ok_or_else(|| "neither XDG_CACHE_HOME nor HOME names a folder for it".to_owned())
                .and_then(|folder| Cache::open(&folder).map_err(|error| error.message().to_owned())),
            compilers: places(),
        }
    }

    /// What is at each place, without a device. Loads the compiler to ask for its release.
    pub fn look(&self) -> Vec<Attempt> {
        let named = match &self.named {
            Some(path) if path.is_file() => Ok(path.display().to_string()),
            Some(path) => Err(format!("{IMAGE_SETTING} names `{}`, which is no file", path.display())),
            None => Err(format!("{IMAGE_SETTING} is not set")),
        };
        let archs: Vec<_> = self.embedded.iter().map(|(arch, _)| format!("sm_{arch}")).collect();
        let kept = self.cache.clone().map(|cache| {
            let stock = cache.stock();
            format!(
                "{} image(s) of {} KiB in `{}`, which holds up to {} MiB",
                stock.images,
                stock.bytes >> 10,
                cache.folder().display(),
                cache.room_bytes() >> 20
            )
        });
        let compiler = Nvrtc::find(&self.compilers, None)
            .map(|nvrtc| {
                let (major, minor) = nvrtc.version();
                format!("NVRTC of CUDA {major}.{minor}, `{}`", nvrtc.path().display())
            })
            .map_err(|error| error.message().to_owned());
        let embedded = match archs.as_slice() {
            [] => Err("this package was built without images (PDKV_CUDA_AOT)".to_owned()),
            archs => Ok(archs.join(", ")),
        };
        [
            ("named", named),
            ("embedded", embedded),
            ("kept", kept),
            ("compiler", compiler),
        ]
        .map(|(place, found)| Attempt { place, found })
        .into()
    }

    /// The kernels for the device of a context. Takes seconds where they have to be compiled.
    ///
    /// # Errors
    /// `Config` for a named image that cannot be read, `Unsupported` or `Device` where the last place fails too, with the reason of each.
    pub fn load(&self, context: &Context) -> Result<Kernels> {
        if let Some(path) = &self.named {
            return named(context, path);
        }
        let capability = context.device().facts()?.capability;
        let mut reasons = Reasons::default();
        match embedded(self.embedded, capability) {
            Some(&(arch, image)) => {
                // On the heap it lies as aligned as a driver expects it to.
                let image = image.to_vec();
                // SAFETY: whole, as the build made it from this release's source.
                match unsafe { Kernels::load_from(context, &image, Origin::Embedded(arch)) } {
                    Ok(kernels) => return Ok(kernels),
                    Err(error) => reasons.add(&format!("the package's image for sm_{arch}"), &error),
                }
            }
            None => reasons.note("the package holds no image for this device"),
        }
        let unit = Unit {
            name: UNIT,
            source: SOURCE,
            headers: HEADERS,
        };
        let key = Key::of(&unit, capability, OPTIONS);
        if let Ok(cache) = &self.cache
            && let Some(image) = cache.load(&key)
        {
            let path = cache.path(&key);
            // SAFETY: whole, by its digest, and of this source, which is a part of its key.
            match unsafe { Kernels::load_from(context, &image, Origin::Kept(path.clone())) } {
                Ok(kernels) => return Ok(kernels),
                Err(error) => {
                    // Of a newer compiler than this driver knows, for example; the next one may be of use.
                    cache.remove(&key);
                    reasons.add(&format!("`{}`", path.display()), &error);
                }
            }
        }
        self.compile(context, capability, &unit, &key)
            .map_err(|error| reasons.with(&error))
    }

    fn compile(&self, context: &Context, capability: (u32, u32), unit: &Unit<'_>, key: &Key) -> Result<Kernels> {
        let nvrtc = Nvrtc::find(&self.compilers, Some(context.driver().version()))?;
        let target = Target::for_device(capability, nvrtc.archs())?;
        let image = nvrtc.compile(unit, target, OPTIONS)?.image;
        // Loaded before it is kept: an image that this driver does not take helps nobody.
        let origin = |not_kept| Origin::Compiled {
            nvrtc: nvrtc.path().to_owned(),
            version: nvrtc.version(),
            not_kept,
        };
        // SAFETY: whole, as the compiler made it of this release's source.
        let kernels = unsafe { Kernels::load_from(context, &image, origin(None)) }?;
        let kept = match &self.cache {
            Ok(cache) => cache.store(key, &image).map_err(|error| error.to_string()),
            Err(reason) => Err(reason.clone()),
        };
        Ok(kernels.with_origin(origin(kept.err())))
    }
}

impl Kernels {
    /// The kernels of this release for the device of a context, from where this process and its environment say.
    ///
    /// # Errors
    /// As [`Sources::load`].
    pub fn find(context: &Context) -> Result<Self> {
        Sources::of_process().load(context)
    }
}

fn named(context: &Context, path: &Path) -> Result<Kernels> {
    let image = std::fs::read(path).map_err(|error| {
        let message = format!(
            "`{IMAGE_SETTING}` names `{}`, which cannot be read: {error}",
            path.display()
        );
        Error::new(ErrorKind::Config, "load kernels", message)
    })?;
    // SAFETY: whoever sets the variable vouches for the file; one of another release lacks the kernels by their names.
    unsafe { Kernels::load_from(context, &image, Origin::Named(path.to_owned())) }.map_err(|error| {
        let message = format!("`{IMAGE_SETTING}` names `{}`: {}", path.display(), error.message());
        Error::new(error.kind(), "load kernels", message)
            .with_hint("unset it to take an image that fits this device and this release")
    })
}

/// The image that serves a device best: of its major number, and no newer than it.
fn embedded<'a>(images: &'a [(u32, &'static [u8])], (major, minor): (u32, u32)) -> Option<&'a (u32, &'static [u8])> {
    let fits = |arch: u32| arch / 10 == major && arch % 10 <= minor;
    images
        .iter()
        .filter(|(arch, _)| fits(*arch))
        .max_by_key(|(arch, _)| *arch)
}

/// The folder of kept images, as the XDG base directories say.
fn folder(cache: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    cache
        .filter(|folder| folder.is_absolute())
        .or_else(|| home.filter(|home| home.is_absolute()).map(|home| home.join(".cache")))
        .map(|folder| folder.join("pdkv/kernels"))
}

/// Why places were of no use.
#[derive(Default)]
struct Reasons(String);

impl Reasons {
    fn note(&mut self, reason: &str) {
        let _ = write!(self.0, "{reason}; ");
    }

    fn add(&mut self, place: &str, error: &Error) {
        self.note(&format!("{place} is not taken: {}", error.message()));
    }

    /// The last place's error, which keeps its hint, after the others' reasons.
    fn with(&self, error: &Error) -> Error {
        let message = format!("no kernels for this device: {}{}", self.0, error.message());
        let all = Error::new(error.kind(), "load kernels", message);
        let all = error
            .context()
            .iter()
            .fold(all, |all, (key, value)| all.with(key, value));
        match error.hint() {
            Some(hint) => all.with_hint(hint),
            None => all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_serves_its_major_number_from_its_minor_number_on() {
        let images: &[(u32, &[u8])] = &[(80, b"a"), (86, b"b"), (90, b"c"), (100, b"d")];
        let arch = |capability| embedded(images, capability).map(|(arch, _)| *arch);
        assert_eq!(arch((8, 0)), Some(80));
        assert_eq!(arch((8, 9)), Some(86));
        assert_eq!(arch((9, 0)), Some(90));
        assert_eq!(arch((10, 3)), Some(100));
        assert_eq!((arch((7, 5)), arch((12, 0))), (None, None));
    }

    #[test]
    fn the_folder_of_images_is_the_users() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(folder(path("/c"), path("/h")), path("/c/pdkv/kernels"));
        assert_eq!(folder(None, path("/h")), path("/h/.cache/pdkv/kernels"));
        assert_eq!(folder(path("relative"), path("/h")), path("/h/.cache/pdkv/kernels"));
        assert_eq!(folder(None, path("here")), None);
    }

    #[test]
    fn every_place_is_told() {
        let sources = Sources {
            named: Some(PathBuf::from("/nowhere")),
            embedded: &[(90, b"")],
            cache: Err("no home".to_owned()),
            compilers: Vec::new(),
        };
        let found = sources.look();
        let places: Vec<_> = found.iter().map(|attempt| attempt.place).collect();
        assert_eq!(places, ["named", "embedded", "kept", "compiler"]);
        assert_eq!(
            found[0].found,
            Err("PDKV_CUDA_IMAGE names `/nowhere`, which is no file".to_owned())
        );
        assert_eq!(found[1].found, Ok("sm_90".to_owned()));
        assert_eq!(found[2].found, Err("no home".to_owned()));
    }
}
