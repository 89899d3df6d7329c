# Installs the library, its headers, the program, and the files that make find_package(mkernel) work.
include(CMakePackageConfigHelpers)

set(mkernel_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/mkernel")

install(TARGETS mkernel EXPORT mkernel-targets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")
if(TARGET mkernel_cli)
  install(TARGETS mkernel_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

install(EXPORT mkernel-targets NAMESPACE mkernel:: DESTINATION "${mkernel_package_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/mkernel-config.cmake.in"
  "${PROJECT_BINARY_DIR}/mkernel-config.cmake" INSTALL_DESTINATION "${mkernel_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/mkernel-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/mkernel-config.cmake" "${PROJECT_BINARY_DIR}/mkernel-config-version.cmake"
  DESTINATION "${mkernel_package_dir}")
